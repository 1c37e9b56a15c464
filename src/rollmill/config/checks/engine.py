"""Checks of `engine`: unsupported features of the chosen engine."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.evaluation import evaluation_set_path
from rollmill.config.engines import EngineSection, VLLMEngineConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath

_SAMPLING: dict[str, tuple[str, object]] = {
    "top_p": ("truncation", 1.0),
    "top_k": ("truncation", 0),
    "min_p": ("truncation", 0.0),
    "stop": ("stop", []),
    "stop_token_ids": ("stop", []),
    "repetition": ("repetition", None),
    "ngram_draft": ("ngram_draft", None),
}
"""Sampling keys: the engine's feature that each needs, and the value that needs none."""


def uses_engine(stage: StageConfig) -> bool:
    """Returns whether the stage uses the policy's engine."""
    return stage.algorithm.uses_rollouts or (stage.evaluation is not None and stage.algorithm.trains_policy)


def unused_engine_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns the section `engine` of a stage that generates nothing, and keys that only asynchronous stages use."""
    if uses_engine(stage) and stage.max_staleness == 0:
        text = "not honoured with max_staleness 0: no completion is under way when weights change; remove it"
        return {("engine", "after_update"): text}
    if uses_engine(stage):
        return {}
    text = f"not honoured: algorithm `{stage.algorithm.name}` rolls nothing out, and nothing is evaluated; remove it"
    return {("engine",): text}


def engine_conflicts(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths within the stage of what its engine does not support, or not with the log-probs that training
    needs."""
    engine = stage.engine
    if not uses_engine(stage):
        return
    if isinstance(engine, VLLMEngineConfig) and engine.sleep and stage.max_staleness > 0:
        text = f"with max_staleness {stage.max_staleness} completions are under way while the trainer works"
        yield ("engine", "sleep"), f"{text}; remove sleep, or set max_staleness: 0"
    taken = sorted(set(range(stage.trainer.ranks)) & set(getattr(engine, "gpus", None) or ()))
    if taken:
        text = "the trainer uses GPUs 0 to" if stage.trainer.ranks > 1 else "the trainer uses GPU"
        yield ("engine", "gpus"), f"{text} {stage.trainer.ranks - 1}; give others, or remove this to share the GPU"
    if stage.algorithm.uses_rollouts:
        wanted: dict[str, tuple[KeyPath, bool]] = {
            "reuse": (("rollout", "reuse"), stage.rollout.reuse is not None),
            "token_budget": (("rollout", "token_budget"), stage.rollout.token_budget is not None),
            "router_replay": (("trainer", "router_replay"), stage.trainer.router_replay is True),
        }
        yield from ((path, lack) for name, (path, on) in wanted.items() if on and (lack := engine.lack(name)))
    sampled: dict[KeyPath, RolloutConfig] = {}
    if stage.algorithm.uses_rollouts:
        sampled["rollout",] = stage.rollout
    for name, each in (stage.evaluation.all_sets() if stage.evaluation is not None else {}).items():
        sampled[(*evaluation_set_path(name), "sampling")] = stage.for_evaluation(each).rollout
    for at, rollout in sampled.items():
        for key, text in _sampling_conflicts(engine, rollout):
            own = at == ("rollout",) or getattr(rollout, key) != getattr(stage.rollout, key)
            yield (*(at if own else ("rollout",)), key), text


def _sampling_conflicts(engine: EngineSection, rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Yields keys of the sampling settings that the engine does not support."""
    for key, (feature, off) in _SAMPLING.items():
        if getattr(rollout, key) != off and (lack := engine.lack(feature)):
            yield key, lack
    if 0 < rollout.temperature < engine.least_temperature:
        text = f"engine `{engine.name}` raises temperatures below {engine.least_temperature} to that"
        yield "temperature", f"{text}; give 0, or at least {engine.least_temperature}"
