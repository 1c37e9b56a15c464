"""Checks of `evaluation`: keys without effect and conflicting choices."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.workflow import container_conflicts, uses_container
from rollmill.config.evaluation import EvaluationSet
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.validation_errors import suggest_match
from rollmill.config.workflows import LiveRequestsWorkflow, WorkflowSection

_TRUNCATION = ("temperature", "top_p", "top_k", "min_p")
_OF_ALL = {"every", "at_start", "sets", "taskset"}


def evaluation_set_path(name: str) -> tuple[str, ...]:
    """Returns the key path of an evaluation set; "" is the unnamed one."""
    return ("evaluation", "sets", name) if name else ("evaluation",)


def unused_evaluation_set_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys without effect in each evaluation set, with the reason."""
    keys: dict[KeyPath, str] = {}
    if stage.evaluation is None:
        return keys
    if stage.evaluation.taskset is None:
        places = "the entries of `sets`"
        if any(domain.evaluation is not None for domain in stage.domains.values()):
            places = "`evaluation` of the domains (domains.NAME.evaluation)"
        for key in EvaluationSet.model_fields.keys() - _OF_ALL:
            keys["evaluation", key] = f"not honoured without evaluation.taskset; write it into {places}"
    for name, each in stage.evaluation.all_sets().items():
        keys |= {(*evaluation_set_path(name), *path): text for path, text in _unhonoured(stage, each)}
    return keys


def _unhonoured(stage: StageConfig, each: EvaluationSet) -> Iterator[tuple[KeyPath, str]]:
    stage_for_set = stage.for_evaluation(each)
    workflow = stage_for_set.workflow
    if each.environment is not None and each.environment.containers:
        if not uses_container(stage_for_set):
            yield (
                ("environment",),
                f"not honoured: nothing of workflow `{workflow.name}` works in a container; remove it",
            )
    elif not workflow.uses_environment:
        yield ("environment",), f"not honoured by workflow `{workflow.name}`, which acts in none; remove it"
    if not workflow.may_have_roles:
        yield ("role",), f"not honoured by workflow `{workflow.name}`, which has no roles; remove it"
    if not workflow.scored_by_rewards:
        yield ("rewards",), f"not honoured by workflow `{workflow.name}`, which rewards by itself; remove it"
    if each.samples == 0:
        for key in _TRUNCATION:
            yield ("sampling", key), "not honoured with samples: 0, which evaluates greedily only; raise samples"
    if not each.k:
        yield ("answer",), "not honoured without k: maj@K needs to know how many vote, for example k: [4]"


def evaluation_conflicts(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths within the stage, each with the problem and a remedy."""
    evaluation = stage.evaluation
    if evaluation is None:
        return
    if not evaluation.all_sets():
        yield ("evaluation", "taskset"), "which tasks? Give the held-out ones here, or by name under evaluation.sets"
        return
    for name, each in evaluation.all_sets().items():
        for path, text in _of_set(stage, name, each):
            yield (
                (*(() if path[0] in ("rollout", "environment") and not name else evaluation_set_path(name)), *path),
                text,
            )
    yield from _watched(stage)


def _of_set(stage: StageConfig, name: str, each: EvaluationSet) -> Iterator[tuple[KeyPath, str]]:
    stage_for_set, prefix = stage.for_evaluation(each), f"evaluation.{f'sets.{name}.' if name else ''}"
    if each.samples == 0 and not each.greedy:
        yield ("samples",), "0 samples and greedy: false evaluate nothing; raise samples or set greedy: true"
    if each.samples > 0 and stage_for_set.rollout.temperature == 0:
        text = f"{prefix}samples are sampled at this temperature; give a value above 0, or set {prefix}samples: 0"
        own = each.sampling.temperature is not None or name
        yield (("sampling", "temperature") if own else ("rollout", "temperature")), text
    if each.k and max(each.k) > each.samples:
        text = f"pass@{max(each.k)} needs at least {max(each.k)} samples, and there are {each.samples}; raise samples"
        yield ("k",), text
    if (
        stage_for_set.workflow.uses_environment
        and stage_for_set.environment is None
        and (name or each.workflow is not None)
    ):
        yield (
            ("workflow",),
            f"workflow `{stage_for_set.workflow.name}` acts in an environment; add a section `environment`",
        )
    if each.workflow is not None:
        yield from _of_workflow(stage, each.workflow)
    for path, text in container_conflicts(stage_for_set):
        if getattr(each, str(path[0]), None) is not None or (path[0] == "tools" and each.environment is not None):
            yield path, text
    differs = each.rewards is not None or each.workflow is not None
    if (
        differs
        and stage_for_set.workflow.scored_by_rewards
        and not stage_for_set.rewards
        and stage.algorithm.trains_policy
    ):
        yield ("rewards",), "an evaluation needs at least one reward; for example rewards: [{name: math}]"


def _of_workflow(stage: StageConfig, workflow: WorkflowSection) -> Iterator[tuple[KeyPath, str]]:
    """Checks what a workflow of an evaluation set needs of the stage."""
    if isinstance(workflow, LiveRequestsWorkflow):
        yield (
            ("workflow",),
            "workflow `live_requests` waits for an application, and nothing asks it about held-out tasks",
        )
    if workflow.uses_tools and not stage.tools:
        yield ("workflow",), f"workflow `{workflow.name}` calls tools; add some, for example tools: [calculator]"
    for key, model in workflow.models.items():
        if model not in stage.all_models:
            yield ("workflow", key), f"no model `{model}`; add it to the section models, or name another"


def _watched(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    evaluation, stop = stage.evaluation, stage.early_stop
    if evaluation is None or stop is None:
        return
    if stop.metric not in evaluation.watched():
        if stop.metric == "eval/sampled" and evaluation.taskset is not None:
            text = "eval/sampled needs evaluation.samples of at least 1 (it is 0); raise it or use eval/greedy"
        elif stop.metric == "eval/greedy" and evaluation.taskset is not None:
            text = "eval/greedy needs evaluation.greedy: true; set it or use eval/sampled"
        else:
            text = _unknown(stop.metric, evaluation.watched())
        yield ("early_stop", "metric"), text
    elif stop.at_least is not None and not stop.metric.endswith("/reward") and not 0 <= stop.at_least <= 1:
        yield ("early_stop", "at_least"), f"accuracy lies between 0 and 1; give for example 0.95, not {stop.at_least:g}"


def best_metric_conflicts(config: RunConfig, stages: list[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Checks that some stage measures the metric of the best checkpoint."""
    watched = [each for stage in stages if stage.evaluation is not None for each in stage.evaluation.watched()]
    chosen = config.checkpoint.keep_best
    if isinstance(chosen, str) and watched and chosen not in watched:
        yield ("checkpoint", "keep_best"), _unknown(chosen, watched)


def _unknown(name: str, watched: list[str]) -> str:
    known = list(dict.fromkeys(watched))
    return f"no evaluation measures `{name}`{suggest_match(name, known)}; there are {', '.join(known)}"
