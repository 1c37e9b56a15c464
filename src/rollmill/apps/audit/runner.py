"""Runs all checks of a stage's tasks, rewards and environment."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollmill.apps.audit.containers import ContainerAudit
from rollmill.apps.audit.environments import EnvironmentAudit
from rollmill.apps.audit.findings import Finding, Severity, skipped_check
from rollmill.apps.audit.grading import AuditGrader
from rollmill.apps.audit.rewards import RewardAudit
from rollmill.apps.audit.tasks import (
    check_contamination,
    check_duplicates,
    check_leakage,
    check_prompt_length,
    check_solvability,
)
from rollmill.config.loader import LoadedRun
from rollmill.config.rewards import attainable_maximum
from rollmill.config.run import StageConfig
from rollmill.data import encode_prompt, load_taskset
from rollmill.data.readers import to_finite_number
from rollmill.errors import ConfigError
from rollmill.models.load import read_tokenizer_and_context
from rollmill.rewards import build_reward_manager
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.rollout.environments.builtin.container import ContainerEnvironment
from rollmill.rollout.environments.pool import EnvironmentPool, RunningEnvironment
from rollmill.rollout.workflows.environment import EnvironmentWorkflow
from rollmill.types import Task

_TURNS = 16
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of an audit.

    Attributes:
        tasks: number of tasks that are scored or acted in, spread over the taskset; text checks use all tasks.
        full: the reward of a right completion; None: evaluation.threshold, else 1.
        template: the form of right completions.
        oracle: a user's function: (task) -> right completion; or (task, observation, turn number) -> right action.
        samples: completions of the run's model per task; 0: none.
        scores: a file of rated tasks.
    """

    tasks: int = 100
    full: float | None = None
    template: str | None = None
    oracle: Callable[..., Any] | None = None
    samples: int = 0
    scores: Path | None = None


def run_audit(
    loaded: LoadedRun, stage: StageConfig, options: AuditOptions, progress: ProgressCallback
) -> list[Finding]:
    """Run every check that applies to the stage.

    Raises:
        TasksetError: the tasks cannot be loaded.
        ConfigError: a reward cannot be built, or `scores` rates none of the tasks.
    """
    tasks = load_taskset(stage.required_taskset).tasks
    sets = [] if stage.evaluation is None else stage.evaluation.tasksets()
    held_out = [task for each in sets for task in load_taskset(each).tasks]
    findings = [check_leakage(tasks), check_duplicates(tasks), check_contamination(tasks, held_out)]
    tokenizer, context = _tokenizer(loaded)
    for name, view in stage.by_domain().items():
        own = [task for task in tasks if task.taskset == name] if name else tasks
        chosen = sample_evenly(own, options.tasks)
        progress(f"{f'domain {name}: ' if name else ''}{len(own)} tasks, {len(chosen)} of them are tried")
        found = []
        if tokenizer is None or context is None:
            found.append(skipped_check("prompt_length", "model.path names no checkpoint, so its context is not known"))
        else:
            lengths = {task.id: len(encode_prompt(task, tokenizer)) for task in own}
            found.append(check_prompt_length(lengths, context, view.rollout.max_new_tokens))
        if view.workflow.uses_environment:
            found += asyncio.run(_environment(view, chosen, options, _full(stage, view, options)))
        if isinstance(view.environment, ContainerEnvironment) and any(each.uses_container for each in view.rewards):
            found += asyncio.run(_containers(view, view.environment, chosen, _full(stage, view, options)))
        texts = view.model_copy(update={"rewards": [each for each in view.rewards if not each.uses_container]})
        for role, scored in texts.by_role().items() if texts.rewards else ():
            full = {each.id: _full(stage, scored, options, each.rewards, of_role=bool(role)) for each in chosen}
            own_checks = asyncio.run(_rewards(scored, chosen, options, full, tokenizer))
            found += [replace(each, check=f"{role}/{each.check}") if role else each for each in own_checks]
        findings += [replace(each, check=f"{name}/{each.check}") for each in found] if name else found
    return [*findings, _solvability(loaded, stage, tasks, options, progress)]


def audit_exit_code(findings: Sequence[Finding], strict: bool) -> int:
    """Return the exit code: 1 with a problem, and if `strict` with a warning."""
    bad = {Severity.PROBLEM, Severity.WARNING} if strict else {Severity.PROBLEM}
    return int(any(each.severity in bad for each in findings))


def sample_evenly(tasks: Sequence[Task], count: int) -> list[Task]:
    """Return at most `count` tasks, evenly over the whole list."""
    if len(tasks) <= count:
        return list(tasks)
    return [tasks[number * len(tasks) // count] for number in range(count)]


def _full(
    stage: StageConfig,
    view: StageConfig,
    options: AuditOptions,
    named: Sequence[str] | None = None,
    *,
    of_role: bool = False,
) -> float:
    """Return the reward of a right completion: the maximum of the rewards of a domain or a role, if it is known.

    Args:
        named: rewards that the task's row names, whose maximum counts, too.
    """
    if options.full is not None:
        return options.full
    own = bool(stage.domains) or of_role or named is not None
    maximum = attainable_maximum(view.rewards, view.reward_settings, named) if own else None
    if maximum is not None:
        return maximum
    thresholds = [] if stage.evaluation is None else [each.threshold for each in stage.evaluation.all_sets().values()]
    return thresholds[0] if thresholds else 1.0


async def _rewards(
    stage: StageConfig, tasks: Sequence[Task], options: AuditOptions, full: Mapping[str, float], tokenizer: Any
) -> list[Finding]:
    manager = build_reward_manager(stage.rewards, stage.reward_settings, tokenizer=tokenizer)
    try:
        checks = RewardAudit(AuditGrader(manager), tasks, full=full, template=options.template, oracle=options.oracle)
        return await checks.run()
    finally:
        manager.close()


async def _containers(
    stage: StageConfig, environment: ContainerEnvironment, tasks: Sequence[Task], full: float
) -> list[Finding]:
    manager = build_reward_manager([each for each in stage.rewards if each.uses_container], stage.reward_settings)
    pool = ContainerPool(environment)
    try:
        return await ContainerAudit(pool, manager, tasks, full).run()
    finally:
        await pool.close()
        manager.close()


async def _environment(stage: StageConfig, tasks: Sequence[Task], options: AuditOptions, full: float) -> list[Finding]:
    assert stage.environment is not None
    pool = EnvironmentPool(stage.environment)

    @asynccontextmanager
    async def opened(task: Task, seed: int) -> AsyncIterator[RunningEnvironment]:
        rollout: Any = SimpleNamespace(id=f"audit/{task.id}", task=task, seed=seed, group_seed=seed, index=0)
        async with pool.one(rollout) as environment:
            yield environment

    workflow = stage.workflow
    checks = EnvironmentAudit(
        opened,
        tasks,
        turns=workflow.turns if isinstance(workflow, EnvironmentWorkflow) else _TURNS,
        limit_s=stage.environment.time_limit_s,
        full=full,
        oracle=options.oracle,
    )
    try:
        return await checks.run()
    finally:
        await pool.close()


def _tokenizer(loaded: LoadedRun) -> tuple[Any, int | None]:
    """Return the tokenizer and the context of the run's checkpoint, if it starts from one."""
    folder = loaded.config.model.path
    if not isinstance(folder, Path):
        return None, None
    return read_tokenizer_and_context(folder, trust=loaded.config.model.trust_remote_code)


def _solvability(
    loaded: LoadedRun, stage: StageConfig, tasks: Sequence[Task], options: AuditOptions, progress: ProgressCallback
) -> Finding:
    if options.scores is not None:
        rates = _rates(options.scores)
        known = {task.id: rates[task.id] for task in tasks if task.id in rates}
        if not known:
            raise ConfigError(f"--scores {options.scores}: it rates none of these tasks; see `rollmill tasks score`")
        return check_solvability(known)
    if not options.samples:
        return skipped_check(
            "solvability", "give --samples 8 and a checkpoint, or --scores FILE of `rollmill tasks score`"
        )
    from rollmill.orchestrator.task_difficulty import score_by_policy

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.jsonl"
        score_by_policy(loaded, stage, file, options.samples, lambda done, of: progress(f"{done} of {of} tasks rated"))
        return check_solvability(_rates(file))


def _rates(file: Path) -> dict[str, float]:
    """Return the success rates by task."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = {str(row["id"]): to_finite_number(row.get("success_rate")) for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: no file of `rollmill tasks score`: {error!r}") from error
    return {task: rate for task, rate in found.items() if rate is not None}
