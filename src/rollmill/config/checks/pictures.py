"""Policies that see: which checkpoint folders are vision-language models, and runs that such models cannot do yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmill.config.environments import GymnasiumSection
from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError

VISION_MODELS = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"),
        *("llava", "llava_next", "llava_onevision", "internvl", "mistral3", "gemma3"),
    }
)
"""`model_type` of the vision-language models that can be trained."""

BOTH_WAYS = frozenset({"gemma3"})
"""`model_type` of models whose tokens of a picture attend to each other in both directions."""


VLLM_SEES_WITHOUT_TORCHVISION = frozenset({"idefics3"})
"""`model_type` of those whose implementation in vLLM imports no torchvision."""


def vision_model_name(model: ModelConfig) -> str | None:
    """Class of the vision-language model in `model.path`, by its config.json; None for text models."""
    facts = _facts(model)
    if facts is None or facts.get("model_type") not in VISION_MODELS:
        return None
    names = facts.get("architectures") or [facts["model_type"]]
    return str(names[0])


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
    """Raise ConfigError for what does not work with a model that sees, and for what needs one without it."""
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
            if isinstance(view.environment, GymnasiumSection) and view.environment.render_mode == "rgb_array":
                raise ConfigError(
                    f"stage {stage.name}: environment.render_mode: rgb_array shows pictures, and the model reads text "
                    "only; write ansi, or train a vision-language model"
                )
        for view in stage.by_domain().values() if name is not None else ():
            facts = _facts(model) or {}
            for key, remedy in _unsupported(view, both_ways=facts.get("model_type") in BOTH_WAYS):
                raise ConfigError(f"stage {stage.name}: {key} does not work with {name}, which sees pictures: {remedy}")


def _unsupported(stage: StageConfig, both_ways: bool) -> Iterator[tuple[str, str]]:
    """Yields keys that are not supported yet, each with a remedy.

    Args:
        both_ways: the model is one of `BOTH_WAYS`.
    """
    algorithm = stage.algorithm
    if both_ways and stage.engine.name != "native":
        remedy = "use `native`: vLLM's attention within a picture, in both directions, is not verified"
        yield f"engine: {stage.engine.name}", remedy
    if stage.engine.name not in ("native", "vllm"):
        yield f"engine: {stage.engine.name}", "use `native` or `vllm`: other engines are not known to take pictures"
    if stage.trainer.sharding in ("tensor", "expert"):
        yield f"trainer.sharding: {stage.trainer.sharding}", "use fsdp, context or none"
    if stage.all_models:
        yield "models", "remove them"
    if stage.experts.others or any(operator.creates_experiences for operator in stage.pipeline):
        yield "experts.sources (or an operator that creates experiences)", "their pictures are not stored; remove it"
    if not algorithm.trains_policy:
        remedy = "transformers has no sequence classifier that sees, so no program could load it; train the policy"
        yield f"algorithm: {algorithm.name}", remedy
