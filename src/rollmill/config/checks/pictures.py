"""Vision-language policies: which checkpoint folders hold such models, and runs that such models cannot do yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError

VISION_MODELS = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"),
        *("llava", "llava_next", "llava_onevision", "internvl", "mistral3", "gemma3", "paligemma"),
    }
)
"""`model_type` of the vision-language models that can be trained."""

BothWays = Literal["picture", "prompt"]
"""Tokens that attend to each other in both directions: those of one picture, or of the whole prompt."""

BOTH_WAYS: dict[str, BothWays] = {"gemma3": "picture", "paligemma": "prompt"}
"""By `model_type`. Models of the kind `prompt` are shown one prompt with pictures and answer it once."""


VLLM_SEES_WITHOUT_TORCHVISION = frozenset({"idefics3"})
"""`model_type` of those whose implementation in vLLM imports no torchvision."""


def vision_model_name(model: ModelConfig) -> str | None:
    """Class of the vision-language model in `model.path`, by its config.json; None for text models."""
    facts = _facts(model)
    if facts is None or facts.get("model_type") not in VISION_MODELS:
        return None
    names = facts.get("architectures") or [facts["model_type"]]
    return str(names[0])


def vision_model_type(model: ModelConfig) -> str | None:
    """`model_type` of the vision-language model in `model.path`; None for text models."""
    found = (_facts(model) or {}).get("model_type")
    return found if found in VISION_MODELS else None


def both_ways(model: ModelConfig) -> BothWays | None:
    """Kind of the vision-language model in `model.path`, if tokens of it attend to each other in both directions."""
    facts = _facts(model) or {}
    return BOTH_WAYS.get(str(facts.get("model_type")))


def _facts(model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of `model.path`; empty for a new model; None if it cannot be read, which loading it reports."""
    if not isinstance(model.path, Path):
        return {}
    try:
        facts = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def require_picture_support(model: ModelConfig, stages: Sequence[StageConfig]) -> None:
    """Raise ConfigError for what does not work with a vision-language model, and for what needs one without it."""
    if _facts(model) is None:
        return
    name = vision_model_name(model)
    for stage in stages:
        if stage.trainer.freeze != TrainerConfig.model_fields["freeze"].default:
            if name is None:
                raise ConfigError(
                    f"stage {stage.name}: trainer.freeze: the model has neither vision tower nor projector; remove "
                    "this key, or train a vision-language model"
                )
            if model.lora is not None:
                raise ConfigError(
                    f"stage {stage.name}: trainer.freeze: with model.lora, adapters in the language part are all that "
                    "is trained; remove one of the two"
                )
        for view in stage.by_domain().values() if name is None else ():
            for key, text in ({} if view.environment is None else view.environment.picture_keys()).items():
                raise ConfigError(f"stage {stage.name}: environment.{key}: {text}")
        held_out = [] if stage.evaluation is None else [*stage.evaluation.all_sets().values()]
        views = [*stage.by_domain().values(), *map(stage.for_evaluation, held_out)]
        for view in views if name is not None else ():
            for key, remedy in _unsupported(view, both_ways(model)):
                raise ConfigError(f"stage {stage.name}: {key} does not work with {name}, which sees pictures: {remedy}")


def _unsupported(stage: StageConfig, kind: BothWays | None) -> Iterator[tuple[str, str]]:
    """Yields keys that are not supported yet, each with a remedy.

    Args:
        kind: of the model in `BOTH_WAYS`.
    """
    algorithm = stage.algorithm
    if kind is not None and stage.engine.name != "native":
        reason = "vLLM's attention within a picture, in both directions, is not verified"
        if kind == "prompt":
            reason = "vLLM attends in both directions within pictures only, and this model within its whole prompt"
        yield f"engine: {stage.engine.name}", f"use `native`: {reason}"
    if kind == "prompt":
        remedy = "its prompt attends in both directions, so that a later turn would change earlier ones"
        if not (stage.workflow.single_turn and stage.workflow.uses_tasks):
            yield f"workflow: {stage.workflow.name}", f"use `single_turn`: {remedy}"
        if stage.rows_name_workflows:
            yield "taskset.fields.workflow", f"leave it out: {remedy}"
    if stage.engine.name not in ("native", "vllm"):
        yield f"engine: {stage.engine.name}", "use `native` or `vllm`: other engines are not known to take pictures"
    if stage.trainer.sharding in ("tensor", "expert"):
        yield f"trainer.sharding: {stage.trainer.sharding}", "use fsdp, context or none"
    if stage.all_models:
        yield "models", "remove them"
    if stage.offline_data.others or any(operator.creates_experiences for operator in stage.pipeline):
        yield (
            "offline_data.sources (or an operator that creates experiences)",
            "their pictures are not stored; remove it",
        )
    if not algorithm.trains_policy:
        remedy = (
            "transformers has no vision-language sequence classifier, so no program could load it; train the policy"
        )
        yield f"algorithm: {algorithm.name}", remedy
