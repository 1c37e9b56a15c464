"""Capability check: every key must have an effect. Finds keys that the chosen components ignore, with those that use
them."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.conflicts import buffer_conflicts, find_conflicts, model_conflicts
from rollmill.config.checks.domains import domain_path, unused_domain_keys, unused_mixing
from rollmill.config.checks.engine import unused_engine_keys
from rollmill.config.checks.evaluation import best_metric_conflicts, evaluation_set_path, unused_evaluation_set_keys
from rollmill.config.checks.offload import offload_conflicts, unused_offload_keys
from rollmill.config.checks.placement import (
    mode_conflicts,
    placement_conflicts,
    sync_conflicts,
    unused_mode_keys,
    unused_placement_keys,
)
from rollmill.config.checks.rewards import change_conflicts
from rollmill.config.checks.workflow import unused_workflow_keys
from rollmill.config.resolve import STAGE_KEYS, ResolvedRun
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.section import Section
from rollmill.config.taskset import MixEntry, TasksetConfig, TasksetSection
from rollmill.config.tree import ConfigProblem, KeyPath, Node, find, format_key_path, iter_leaves, locate_key
from rollmill.config.workflows import LiveRequestsWorkflow

_TRUNCATION = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (
    "max_new_tokens",
    "max_sequences",
    "prefill_tokens",
    "stop",
    "stop_token_ids",
    "deadline_s",
    "repetition",
    "ngram_draft",
)


def check_capabilities(resolved: ResolvedRun) -> list[ConfigProblem]:
    """Returns explicit keys without effect, and choices that contradict each other."""
    found = _shadowed_base_keys(resolved) + _unused_stage_keys(resolved)
    for path, text in unused_run_keys(resolved.config, resolved.stages).items():
        if find(resolved.root, path):
            found.append(ConfigProblem(*locate_key(resolved.root, path), text))
    config, stages = resolved.config, resolved.stages
    wrong = (
        *_own_conflicts(config.model, "model"),
        *_own_conflicts(config.placement, "placement"),
        *model_conflicts(config.model, stages),
        *offload_conflicts(config, stages),
        *best_metric_conflicts(config, stages),
        *placement_conflicts(config, stages),
        *mode_conflicts(config, stages),
        *sync_conflicts(config, stages),
        *buffer_conflicts(stages),
        *change_conflicts(config, stages),
    )
    found += [ConfigProblem(*locate_key(resolved.root, path), text) for path, text in wrong]
    for stage, tree in zip(stages, resolved.trees, strict=True):
        unused = find_unused_keys(stage)
        for path, text in _own_conflicts(stage):
            if not any(path[: length + 1] in unused for length in range(len(path))):
                found.append(ConfigProblem(*locate_key(tree, path), text))
        found += [ConfigProblem(*locate_key(tree, path), text) for path, text in find_conflicts(stage)]
    return found


def _own_conflicts(section: Section, *at: str) -> Iterator[tuple[KeyPath, str]]:
    """Yields the conflicts inside a section and those within it."""
    for path, each in section.walk(at):
        for key, text in each.conflicts().items():
            yield (*path, *key.split(".")), text


def find_unused_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys that no component of this stage uses, each with those that would."""
    if not stage.domains:
        return _find_unused_keys(stage) | dict(unused_mixing(stage))
    keys = unused_domain_keys(stage, _find_unused_keys)
    keys |= {("mixing", key): text for key, text in stage.mixing.unused_keys().items()}
    if stage.evaluation is not None:
        for path, text in unused_evaluation_set_keys(stage).items():
            name = str(path[2]) if len(path) > 2 and path[2] in stage.domains else ""
            keys[domain_path(stage, name, path) if name else path] = text
    return keys


def _find_unused_keys(stage: StageConfig) -> dict[KeyPath, str]:
    keys: dict[KeyPath, str] = {}
    algorithm, evaluation = stage.algorithm, stage.evaluation if stage.algorithm.trains_policy else None
    learner = f"algorithm `{algorithm.name}` learns from {algorithm.examples} and rolls nothing out"
    if not algorithm.uses_rollouts:
        names = ("batch", "group_size", "reuse", "oversample", "token_budget", "partial")
        batch = [("rollout", name) for name in names]
        for key in (
            *batch,
            ("max_staleness",),
            ("sync_interval",),
            ("buffer",),
            ("trainer", "router_replay"),
        ):
            keys[key] = f"not honoured: {learner}; {_instead(key)}"
        if not any(operator.taken & algorithm.sources for operator in stage.pipeline):
            keys["pipeline",] = f"not honoured: {learner}, on which none of these operators can act; remove it"
        if evaluation is None:
            for name in (*_TRUNCATION, *_SAMPLING):
                keys["rollout", name] = f"not honoured: {learner}, and there is no evaluation; remove it"
            keys["rewards",] = f"not honoured: {learner}, and there is no evaluation to judge; remove them"
            keys["reward_settings",] = f"not honoured: {learner}, and there is no evaluation to judge; remove it"
        elif all(each.samples == 0 for each in evaluation.all_sets().values()):
            for name in _TRUNCATION:
                keys["rollout", name] = (
                    f"not honoured: {learner}, and evaluation is greedy only (samples: 0); remove it"
                )
    if not algorithm.trains_policy:
        keys["evaluation",] = (
            f"not honoured by algorithm `{algorithm.name}`, which changes no policy; the metric `pairs/accuracy` is "
            "measured on each batch before it is learned from; remove it"
        )
        keys["trainer", "logprob_chunk"] = f"not honoured by algorithm `{algorithm.name}`, which needs no log-probs"
    for at, section in stage.walk():
        keys |= {(*at, key): text for key, text in section.unused_keys().items()}
    keys |= _unused_offline_data_keys(stage)
    keys |= unused_workflow_keys(stage)
    keys |= unused_offload_keys(stage)
    keys |= unused_engine_keys(stage)
    if not stage.needs_taskset and isinstance(stage.workflow, LiveRequestsWorkflow):
        keys["taskset",] = "not honoured by workflow `live_requests`, whose prompts come from an application; remove it"
    elif not stage.needs_taskset:
        keys["taskset",] = f"not honoured: {learner}, and `taskset` is not among offline_data.sources; add it there"
    if evaluation is None:
        keys["early_stop",] = (
            "not honoured without `evaluation`, which measures its metric; add evaluation or remove it"
        )
    if not algorithm.uses_rollouts:
        for path, section in _sections(stage.taskset, ("taskset",)):
            if section.sampler.uses_success:
                keys[(*path, "sampler")] = (
                    f"not honoured: {learner}, so no success is seen; use `shuffled`, or one by difficulty"
                )
    if stage.evaluation is not None:
        keys |= unused_evaluation_set_keys(stage)
        for name, each in stage.evaluation.all_sets().items():
            keys |= unused_evaluation_keys(each.taskset, evaluation_set_path(name))
    return keys


def _unused_offline_data_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys of `offline_data` without effect."""
    keys: dict[KeyPath, str] = {}
    algorithm = stage.algorithm
    if not algorithm.uses_examples:
        text = f"not honoured: algorithm `{algorithm.name}` imitates nothing; sft, mix, chord and dpo honour it"
        keys["offline_data",] = text
    elif algorithm.uses_pairs:
        text = f"not honoured: algorithm `{algorithm.name}` learns from pairs; kto and those that imitate honour it"
        keys["offline_data", "rated_at_least"] = text
    return keys


def unused_evaluation_keys(taskset: TasksetConfig, at: KeyPath) -> dict[KeyPath, str]:
    """Returns samplers and weights of held-out tasks, which are all evaluated once."""
    keys: dict[KeyPath, str] = {}
    for path, section in _sections(taskset, (*at, "taskset")):
        keys[(*path, "sampler")] = "not honoured: every held-out task is evaluated each time; remove it"
        if isinstance(section, MixEntry):
            keys[(*path, "weight")] = "not honoured: every held-out task is evaluated each time; it is in `taskset.mix`"
    return keys


def _sections(taskset: TasksetConfig | None, at: KeyPath) -> list[tuple[KeyPath, TasksetSection]]:
    """Returns the sections of a taskset that set a sampler, each with its key path."""
    if taskset is None:
        return []
    entries = [((*at, "mix", index), entry) for index, entry in enumerate(taskset.mix)]
    return [*entries] or [(at, taskset)]


def _instead(key: KeyPath) -> str:
    if key == ("rollout", "batch"):
        return "demonstrations per step are `algorithm.batch`"
    return "algorithms that roll out honour it, such as grpo"


def unused_run_keys(config: RunConfig, stages: list[StageConfig]) -> dict[KeyPath, str]:
    """Returns run-wide keys without effect."""
    keys: dict[KeyPath, str] = {}
    if all(stage.evaluation is None for stage in stages):
        keys["checkpoint", "keep_best"] = (
            "not honoured without `evaluation`, which finds the best; add it or remove this"
        )
    for name in ("model", "placement"):
        for at, section in getattr(config, name).walk((name,)):
            keys |= {(*at, key): text for key, text in section.unused_keys().items()}
    return keys | unused_placement_keys(config, stages) | unused_mode_keys(config)


def _unused_stage_keys(resolved: ResolvedRun) -> list[ConfigProblem]:
    """Returns keys without effect in every stage that has them; a key of the whole file may serve only some stages."""
    marked = [_marked_leaves(stage, tree) for stage, tree in zip(resolved.stages, resolved.trees, strict=True)]
    honoured = {
        id(leaf)
        for tree, marks in zip(resolved.trees, marked, strict=True)
        for leaf in iter_leaves(tree)
        if id(leaf) not in marks
    }
    found: dict[tuple[str, str], ConfigProblem] = {}
    for stage, tree in zip(resolved.stages, resolved.trees, strict=True):
        for path, text in find_unused_keys(stage).items():
            node = find(tree, path)
            if node is not None and not any(id(leaf) in honoured for leaf in iter_leaves(node)):
                place, key = locate_key(tree, path)
                found.setdefault((place, key), ConfigProblem(place, key, text))
    return list(found.values())


def _marked_leaves(stage: StageConfig, tree: Node) -> set[int]:
    nodes = [find(tree, path) for path in find_unused_keys(stage)]
    return {id(leaf) for node in nodes if node is not None for leaf in iter_leaves(node)}


def _shadowed_base_keys(resolved: ResolvedRun) -> list[ConfigProblem]:
    """Returns keys of the whole file that every stage replaces. Unused defaults of included files are allowed."""
    alive = {id(leaf) for tree in resolved.trees for leaf in iter_leaves(tree)}
    found = []
    for key, section in resolved.root.value.items():
        if key not in STAGE_KEYS:
            continue
        dead = [leaf for leaf in iter_leaves(section) if id(leaf) not in alive and not leaf.origin.included]
        if dead and len(dead) == len(list(iter_leaves(section))):
            dead = [section]
        for node in dead:
            key = format_key_path(node.path)
            text = f"every stage sets its own, so this is never used; remove it or change stages.0.{key}"
            found.append(ConfigProblem(node.origin.place, key, text))
    return found
