"""Evaluates models x sets of held-out tasks. Results are stored by cell, and stored cells are not evaluated again."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollmill.config.checks.evaluation import evaluation_conflicts
from rollmill.config.describe import evaluation_key
from rollmill.config.evaluation import EvaluationConfig, EvaluationSet
from rollmill.config.loader import LoadedRun, load_evaluation_run
from rollmill.config.run import StageConfig
from rollmill.data import Taskset, load_taskset
from rollmill.data.images import require_seen
from rollmill.errors import ConfigError
from rollmill.files import atomic_write, read_json_object, to_jsonable
from rollmill.models.cpu.step_timing import StepSize, choose_precision
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.bench_results import Cell, Results
from rollmill.orchestrator.eval_targets import RUN_FILE, CheckpointTarget, EvalTarget, ServedTarget
from rollmill.orchestrator.evaluation import Evaluator
from rollmill.orchestrator.evaluation_set import SetResult
from rollmill.orchestrator.rollouts import LocalRollouts
from rollmill.orchestrator.setup import MACHINE, choose_device, require_models, stage_overrides
from rollmill.orchestrator.task_selection import select_held_out
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.auxiliary_models import connect_endpoint
from rollmill.rollout.served_model import ServedExplorer, ServedModel, check_endpoint_support
from rollmill.types import Task

CELLS = "cells"
Progress = Callable[[str], None]


def settings_of(
    config: Path | None, chosen: Sequence[EvalTarget], overrides: Sequence[str], samples: int | None, k: Sequence[int]
) -> tuple[LoadedRun, StageConfig]:
    """Load the run file with the evaluation (default: the first run's), and its last stage with an evaluation.

    Raises ConfigError: there is no such file or no evaluation in it, the evaluation uses a model that only the run
    knows, or `samples` and `k` do not fit it.
    """
    runs = [each.run for each in chosen if each.run is not None]
    if config is None and not runs:
        raise ConfigError("a model's folder does not say what to evaluate; give --config FILE with an `evaluation`")
    if config is None:
        config = runs[0] / RUN_FILE
        overrides = _overrides_of_last_stage(load_evaluation_run(config), overrides)
    loaded = load_evaluation_run(config, overrides)
    stages = [stage for stage in loaded.stages if stage.evaluation is not None]
    if not stages:
        raise ConfigError(f"{loaded.path} has no evaluation; add evaluation.taskset or evaluation.sets")
    stage = stages[-1]
    assert stage.evaluation is not None
    require_models(stage)
    changes: dict[str, Any] = {"evaluation": _with_samples(stage.evaluation, samples, k)}
    machine = loaded.path.parent / MACHINE
    if stage.trainer.precision == "auto" and machine.is_file():  # the run's own, to reproduce its results
        precision = read_json_object(machine).get("precision", "auto")
        changes["trainer"] = stage.trainer.model_copy(update={"precision": precision})
    changed = stage.model_copy(update=changes)
    for path, text in evaluation_conflicts(changed):
        if path[0] != "early_stop":
            raise ConfigError(f"{loaded.path}: {'.'.join(map(str, path))}: {text}")
    return loaded, changed


def _overrides_of_last_stage(loaded: LoadedRun, overrides: Sequence[str]) -> Sequence[str]:
    """Prefix overrides with the last stage that has an evaluation."""
    found = [index for index, stage in enumerate(loaded.stages) if stage.evaluation is not None]
    return stage_overrides(loaded, found[-1], overrides) if found else overrides


def _with_samples(evaluation: EvaluationConfig, samples: int | None, k: Sequence[int]) -> EvaluationConfig:
    changes: dict[str, Any] = {} if samples is None else {"samples": samples}
    changes |= {"k": list(k)} if k else {}
    sets = {name: each.model_copy(update=changes) for name, each in evaluation.sets.items()}
    changed = evaluation.model_copy(update={**changes, "sets": sets})
    for name, each in changed.all_sets().items():
        if each.k and max(each.k) > each.samples:
            where = f"of {name} " if name else ""
            raise ConfigError(f"pass@{max(each.k)} {where}needs --samples {max(each.k)} at least, not {each.samples}")
    return changed


def bench(
    loaded: LoadedRun, stage: StageConfig, chosen: Sequence[EvalTarget], out: Path, progress: Progress
) -> Results:
    """Evaluate every model on every set; results in `out` for the same weights and settings are reused.

    Raises RollmillError like an evaluation.
    """
    assert stage.evaluation is not None
    torch.set_num_threads(1 if loaded.config.threads == "auto" else loaded.config.threads)
    sets = stage.evaluation.all_sets()
    tasksets = {name: load_taskset(each.taskset) for name, each in sets.items()}
    examples = load_taskset(stage.taskset).tasks if stage.uses_task_examples and stage.taskset is not None else []
    given = {name: _digest([*map(_content, each.tasks), *map(_content, examples)]) for name, each in tasksets.items()}
    precision = None if stage.trainer.precision == "auto" else stage.trainer.precision
    cells: list[Cell] = []
    for subject in chosen:
        marks = {name: _fingerprint(loaded, stage, name, given[name], subject) for name in sets}
        stored = {name: _stored(out, subject, name, each, marks[name]) for name, each in sets.items()}
        todo = [name for name, found in stored.items() if found is None]
        if todo:
            progress(f"{subject.label}: {', '.join(name or 'held-out tasks' for name in todo)}")
            missing, todo_stage = {name: tasksets[name] for name in todo}, _only_sets(stage, todo)
            if isinstance(subject, ServedTarget):
                evaluated = asyncio.run(_evaluate_served(loaded, todo_stage, subject, missing, out, marks, progress))
            else:
                policy = subject.load(loaded.config.seed, choose_device(loaded.config.device))
                if precision is None:  # one for all, since choosing again may give another result
                    precision = choose_precision(policy.model, policy.device, StepSize.of_generation())
                found = _evaluate(loaded, todo_stage, subject, policy, precision, missing, examples, out, marks)
                evaluated = asyncio.run(found)
                del policy, found
            stored |= {result.name: result for result in evaluated}
            gc.collect()  # the next model needs the memory
        cells += [Cell(subject, found) for found in stored.values() if found is not None]
    return Results(cells)


async def _evaluate(
    loaded: LoadedRun,
    stage: StageConfig,
    subject: CheckpointTarget,
    policy: PolicyModel,
    precision: str,
    tasksets: Mapping[str, Taskset],
    examples: Sequence[Task],
    out: Path,
    marks: Mapping[str, str],
) -> list[SetResult]:
    def build_rewards(view: StageConfig) -> RewardManager:
        return build_reward_manager(
            view.rewards, view.reward_settings, tokenizer=policy.tokenizer, device=str(policy.device)
        )

    rewards = StageRewards.build(stage, build_rewards)
    explorers = LocalRollouts(stage, policy, rewards, precision=precision, tasks=examples, trained_on=False)
    explorers.publish(subject.step or 0)
    evaluator = Evaluator(
        stage,
        select_held_out(stage, policy, tasksets, []),
        rewards=rewards,
        build_explorer=explorers.explorer,
        build_rewards=build_rewards,
        seed=loaded.config.seed,
    )
    try:
        return await _all_sets(evaluator, tasksets, subject, out, marks)
    finally:
        evaluator.close()
        await explorers.close()
        rewards.close()


async def _evaluate_served(
    loaded: LoadedRun,
    stage: StageConfig,
    subject: ServedTarget,
    tasksets: Mapping[str, Taskset],
    out: Path,
    marks: Mapping[str, str],
    progress: Progress,
) -> list[SetResult]:
    """Evaluate a served model, like `_evaluate`. Completions without a reply get no reward and are reported."""
    assert stage.evaluation is not None

    sets = stage.evaluation.all_sets()
    for each in sets.values():
        check_endpoint_support(stage.for_evaluation(each), str(subject.folder))

    def build_rewards(view: StageConfig) -> RewardManager:
        return build_reward_manager(view.rewards, view.reward_settings, device=str(choose_device(loaded.config.device)))

    model = ServedModel(
        str(subject.folder), connect_endpoint(str(subject.folder), subject.model), completes=subject.model.completes
    )
    rewards = StageRewards.build(stage, build_rewards)
    held_out = {name: tasksets[name].tasks[: each.limit] for name, each in sets.items()}
    for name, each in sets.items():  # requests are text
        require_seen(each.taskset, held_out[name], False, f"{subject.label}: {evaluation_key(name)}.taskset")
    seed = loaded.config.seed
    evaluator = Evaluator(
        stage,
        held_out,
        rewards=rewards,
        build_explorer=lambda _, scorers: ServedExplorer(model, scorers),
        build_rewards=build_rewards,
        seed=seed,
    )
    try:
        results = await _all_sets(evaluator, tasksets, subject, out, marks)
    finally:
        evaluator.close()
        model.close()
        rewards.close()
    if model.unanswered:
        first = model.unanswered[0]
        progress(f"{subject.label}: {len(model.unanswered)} completions never came and earned nothing; {first}")
    return results


async def _all_sets(
    evaluator: Evaluator, names: Iterable[str], subject: EvalTarget, out: Path, marks: Mapping[str, str]
) -> list[SetResult]:
    """Evaluate one set after the other; each result is written at once."""
    results: list[SetResult] = []
    for name in names:
        [found] = (await evaluator.evaluate([name])).sets
        content = {"subject": subject.label, "mark": marks[name], **found.to_json()}
        atomic_write(_file(out, subject, name), (json.dumps(to_jsonable(content), allow_nan=False) + "\n").encode())
        results.append(found)
    return results


def _only_sets(stage: StageConfig, names: Sequence[str]) -> StageConfig:
    """The stage with an evaluation of these sets only."""
    evaluation = stage.evaluation
    assert evaluation is not None
    sets = {name: each for name, each in evaluation.sets.items() if name in names}
    changes = {"sets": sets} | ({} if "" in names else {"taskset": None})
    return stage.model_copy(update={"evaluation": evaluation.model_copy(update=changes)})


def _file(out: Path, subject: EvalTarget, name: str) -> Path:
    """Path of a cell's file; a digest tells apart labels that are equal once simplified."""
    simplified = re.sub(r"[^\w.@-]+", "-", subject.label).strip("-")
    digest = hashlib.sha256(subject.label.encode()).hexdigest()[:6]
    return out / CELLS / f"{simplified}-{digest}" / f"{name or 'held-out'}{'.set' if name else ''}.json"


def _fingerprint(loaded: LoadedRun, stage: StageConfig, name: str, tasks: str, subject: EvalTarget) -> str:
    """A digest of everything that a cell's numbers depend on; `tasks` is the digest of the tasks."""
    assert stage.evaluation is not None
    section = stage.evaluation.all_sets()[name]
    evaluated = stage.for_evaluation(section)
    keys = {"workflow", "environment", "tools", "models", "rewards", "reward_settings", "rollout"}
    own = section.model_dump(mode="json", exclude={"every", "at_start", "sets"})
    settings = [name, own, evaluated.model_dump(mode="json", include=keys), loaded.config.seed, stage.trainer.precision]
    code = [file.read_text() for file in loaded.config.plugins]
    return _digest([json.dumps(settings, sort_keys=True), tasks, *code, subject.identity()])


def _content(task: Task) -> str:
    """A task's content as text."""
    content = [task.id, task.prompt, task.answer, task.response, task.metadata]
    return json.dumps(content, sort_keys=True, default=lambda other: type(other).__name__)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _stored(out: Path, subject: EvalTarget, name: str, section: EvaluationSet, mark: str) -> SetResult | None:
    path = _file(out, subject, name)
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    return SetResult.from_json(section, data) if data["mark"] == mark else None
