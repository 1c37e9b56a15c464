"""Checks of `engine`: unsupported features of the chosen engine."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.evaluation import evaluation_set_path
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath

_TRUNCATION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_LEAST_TEMPERATURE = 0.01
_NATIVE = "use engine `native`, or remove this"


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
    """Yields key paths within the stage of what vLLM does not support, or not with the log-probs that training
    needs."""
    if not isinstance(stage.engine, VLLMEngineConfig) or not uses_engine(stage):
        return
    if stage.engine.sleep and stage.max_staleness > 0:
        text = f"with max_staleness {stage.max_staleness} completions are under way while the trainer works"
        yield ("engine", "sleep"), f"{text}; remove sleep, or set max_staleness: 0"
    if stage.algorithm.uses_rollouts:
        yield from _of_rollouts(stage.rollout)
        if stage.trainer.router_replay is True:
            text = "engine `vllm` does not say which experts it chose"
            yield ("trainer", "router_replay"), f"{text}; {_NATIVE}"
    sampled: dict[KeyPath, RolloutConfig] = {}
    if stage.algorithm.uses_rollouts:
        sampled["rollout",] = stage.rollout
    for name, each in (stage.evaluation.all_sets() if stage.evaluation is not None else {}).items():
        sampled[(*evaluation_set_path(name), "sampling")] = stage.for_evaluation(each).rollout
    for at, rollout in sampled.items():
        for place, text in _of_sampling(rollout):
            own = at == ("rollout",) or getattr(rollout, place) != getattr(stage.rollout, place)
            yield (*(at if own else ("rollout",)), place), text


def _of_rollouts(rollout: RolloutConfig) -> Iterator[tuple[KeyPath, str]]:
    if rollout.reuse is not None:
        yield ("rollout", "reuse"), f"engine `vllm` takes no drafts; {_NATIVE}"
    if rollout.token_budget is not None:
        text = "engine `vllm` cannot go on with a completion that another step began"
        yield ("rollout", "token_budget"), f"{text}; use rollout.oversample, or engine `native`"


def _of_sampling(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Checks sampling settings."""
    for key, off in _TRUNCATION.items():
        if getattr(rollout, key) != off:
            text = "engine `vllm` does not say how much probability truncation keeps, which training needs"
            yield key, f"{text}; {_NATIVE}"
    if rollout.repetition is not None:
        yield "repetition", f"engine `vllm` does not look for repetition; {_NATIVE}"
    if rollout.ngram_draft is not None:
        text = "engine `vllm` has speculative decoding of its own (engine.options.speculative_config)"
        yield "ngram_draft", f"{text}; remove this, or use engine `native`"
    if 0 < rollout.temperature < _LEAST_TEMPERATURE:
        text = f"engine `vllm` raises temperatures below {_LEAST_TEMPERATURE} to that"
        yield "temperature", f"{text}; give 0, or at least {_LEAST_TEMPERATURE}"
