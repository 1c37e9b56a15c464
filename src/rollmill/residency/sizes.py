"""How much the components of a stage take, before any of them is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import nn

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.residency_checks import model_rewards, needs_of
from rollmill.config.run import StageConfig
from rollmill.models.load import Policy, empty_model
from rollmill.models.lora import adapted_layers, has_lora
from rollmill.recipes import Distill, SelfDistill
from rollmill.rewards.model import scorers_in_memory

_SHARE = 0.8
_MASTER = 4  # bytes of an fp32 master weight


def sizes_of(stage: StageConfig, policy: Policy, precision: str) -> dict[str, int]:
    """Bytes of each component that the stage has, and of `gradients`; those of the engine's cache are not known: 0."""
    model: Any = policy.model
    needs = needs_of(stage)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = {"policy": _weights(model.parameters()), "optimizer": _adam(trained), "gradients": _weights(trained)}
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
        sizes |= {"critic": _weights(copied), "critic_optimizer": _adam(learning)}
        sizes["gradients"] = max(sizes["gradients"], _weights(learning))
    if isinstance(stage.algorithm, Distill) and stage.algorithm.teacher is not None:
        sizes["teacher"] = _weights(empty_model(stage.algorithm.teacher).parameters())
    if scorers := scorers_in_memory(model_rewards(stage), str(policy.device)):
        sizes["rewards"] = sum(each.nbytes for scorer in scorers for each in scorer.model.parameters())
    if cast := _cast(model, precision):
        sizes["cast"] = cast
    sizes["cache"] = 0
    return {name: size for name, size in sizes.items() if name in needs or name == "gradients"}


def machine_budget(device: torch.device) -> float:
    """What a run may take where it says nothing: a share of the device's memory, in bytes."""
    if device.type == "cuda":
        return _SHARE * torch.cuda.get_device_properties(device).total_memory
    return _SHARE * psutil.virtual_memory().total


def _cast(model: nn.Module, precision: str) -> int:
    """The engine's twin (engines/native/weights.py): casts in bf16, merged weights in fp32."""
    if precision == "bf16":
        return sum(2 * each.numel() for name, each in model.named_parameters() if ".lora_" not in name)
    return _weights(layer.base_layer.weight for layer in adapted_layers(model).values())


def _weights(parameters: Iterable[torch.Tensor]) -> int:
    return sum(max(_MASTER, each.element_size()) * each.numel() for each in parameters)


def _adam(parameters: Iterable[torch.Tensor]) -> int:
    """Two moments of each weight, and a step count of each tensor."""
    trained = list(parameters)
    return 2 * _weights(trained) + _MASTER * len(trained)
