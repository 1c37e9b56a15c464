"""How much the components of a stage take, before any of them is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import nn

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.checks.offload import component_phases, reward_models
from rollmill.config.run import StageConfig
from rollmill.models.load import PolicyModel, build_meta_model
from rollmill.models.lora import adapted_layers, has_lora
from rollmill.recipes import Distill, SelfDistill
from rollmill.rewards.reward_model import loaded_reward_models

_SHARE = 0.8
_MASTER = 4  # bytes of an fp32 master weight


def estimate_component_sizes(stage: StageConfig, policy: PolicyModel, precision: str) -> dict[str, int]:
    """Bytes of each component that the stage has, and of `gradients`; those of the engine's cache are not known: 0."""
    model: Any = policy.model
    needs = component_phases(stage)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = {
        "policy": _weight_bytes(model.parameters()),
        "optimizer": _adam_state_bytes(trained),
        "gradients": _weight_bytes(trained),
    }
    if "reference" in needs and not has_lora(model):
        sizes["reference"] = sizes["policy"]
    if "teacher" in needs and isinstance(stage.algorithm, SelfDistill) and not has_lora(model):
        sizes["teacher"] = sizes["policy"]
    if "critic" in needs:
        assert isinstance(stage.algorithm, PolicyGradientOptions)
        own = stage.algorithm.critic.network == "own"
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, device="meta")
        copied = [*(model.base_model.parameters() if own else []), *head.parameters()]
        learning = [parameter for parameter in copied if parameter.requires_grad]
        sizes |= {"critic": _weight_bytes(copied), "critic_optimizer": _adam_state_bytes(learning)}
        sizes["gradients"] = max(sizes["gradients"], _weight_bytes(learning))
    if isinstance(stage.algorithm, Distill) and stage.algorithm.teacher is not None:
        sizes["teacher"] = _weight_bytes(build_meta_model(stage.algorithm.teacher).parameters())
    if scorers := loaded_reward_models(reward_models(stage), str(policy.device)):
        sizes["rewards"] = sum(each.nbytes for scorer in scorers for each in scorer.model.parameters())
    if cast := _cast_bytes(model, precision):
        sizes["cast"] = cast
    sizes["cache"] = 0
    return {name: size for name, size in sizes.items() if name in needs or name == "gradients"}


def default_memory_budget(device: torch.device) -> float:
    """What a run may take where it says nothing: a share of the device's memory, in bytes."""
    if device.type == "cuda":
        return _SHARE * torch.cuda.get_device_properties(device).total_memory
    return _SHARE * psutil.virtual_memory().total


def _cast_bytes(model: nn.Module, precision: str) -> int:
    """The engine's twin (engines/native/weights.py): casts in bf16, merged weights in fp32."""
    if precision == "bf16":
        return sum(2 * each.numel() for name, each in model.named_parameters() if ".lora_" not in name)
    return _weight_bytes(layer.base_layer.weight for layer in adapted_layers(model).values())


def _weight_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(max(_MASTER, each.element_size()) * each.numel() for each in parameters)


def _adam_state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Two moments of each weight, and a step count of each tensor."""
    trained = list(parameters)
    return 2 * _weight_bytes(trained) + _MASTER * len(trained)
