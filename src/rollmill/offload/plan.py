"""The offload plan: the tier of each component in each phase, from run file and memory budget; component sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import nn

from rollmill.config.checks.offload import component_phases, reward_models
from rollmill.config.engines import EngineSection, NativeEngineConfig, VLLMEngineConfig
from rollmill.config.offload import Phase
from rollmill.config.run import StageConfig
from rollmill.config.trainer import MOMENT_BLOCK
from rollmill.errors import ConfigError
from rollmill.models.cpu.int8 import int8_linears
from rollmill.models.load import PolicyModel, build_meta_model
from rollmill.models.lora import adapted_layers, has_lora, merges_adapters
from rollmill.models.quantization import count_weights
from rollmill.rewards.builtin.model import loaded_reward_models

StorageTier = Literal["device", "memory", "disk", "destroyed"]
GB = 1e9
ENGINE = "engine"  #: vLLM's process, or all that explorers in other processes hold
GRADIENTS = "gradients"
"""They exist only during an update, so they count but never move."""


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """A component: its size in bytes and the phases that need it on the device.

    `choice` is its tier in the other phases, from the run file. `fallback` is the tier that `auto` uses if there is no
    room. An `eager` component has an unknown size and leaves whenever anything leaves.
    """

    name: str
    size: int
    needed: frozenset[Phase]
    choice: Literal["auto", "device", "memory", "disk", "destroyed"]
    fallback: StorageTier
    eager: bool = False


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Tier of each component by phase, and the bytes on the device."""

    places: Mapping[Phase, Mapping[str, StorageTier]]
    sizes: Mapping[Phase, int]
    components: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each component, as estimated before anything is made."""

    def describe(self) -> str:
        """Returns one line: which component leaves the device when, and the size of the rest."""
        left: dict[str, list[str]] = {}
        for phase, places in self.places.items():
            for name, place in places.items():
                if place != "device" and name != GRADIENTS:
                    left.setdefault(f"{name.replace('_', ' ')} {_describe_tier(place)}", []).append(phase)
        moves = [f"{what} in {' and '.join(phases)}" for what, phases in left.items()]
        stays = ", ".join(f"{phase} {size / GB:.3g}" for phase, size in self.sizes.items())
        return f"offload: {'; '.join(moves) or 'everything stays where it is'}; GB by phase: {stays}"


def engine_leaves(plan: OffloadPlan, phase: Phase) -> bool:
    """Returns whether the engine, in one or several processes of its own, is off the device in a phase."""
    return plan.places[phase].get(ENGINE, "device") != "device"


def plan_offload(
    parts: Sequence[ComponentSpec], phases: Sequence[Phase], budget: float, where: str = ""
) -> OffloadPlan:
    """Builds the plan for a budget in bytes. In every phase components that do not fit leave, the largest idle one
    first.

    Args:
        where: prefix of the error message, such as the stage.

    Raises:
        ConfigError: a phase needs more than the budget; names the phase, its components and their sizes.
    """
    places: dict[Phase, dict[str, StorageTier]] = {}
    sizes: dict[Phase, int] = {}
    for phase in phases:
        fixed = [part for part in parts if phase in part.needed or part.choice == "device"]
        idle = [part for part in parts if part not in fixed]
        taken = sum(part.size for part in fixed)
        if taken > budget:
            listed = ", ".join(f"{part.name.replace('_', ' ')} {part.size / GB:.3g}" for part in fixed if part.size)
            raise ConfigError(
                f"{where}offload.budget_gb: the budget is {budget / GB:.3g} GB, and the phase `{phase}` needs "
                f"{taken / GB:.3g} GB on the device ({listed}); raise budget_gb, or make the models smaller"
            )
        staying = _components_that_fit(idle, budget - taken)
        here = [*fixed, *staying]
        places[phase] = {part.name: "device" if part in here else _offload_tier(part) for part in parts}
        sizes[phase] = sum(part.size for part in here)
    return OffloadPlan(places, sizes, {part.name: part.size for part in parts})


def _components_that_fit(idle: Sequence[ComponentSpec], room: float) -> list[ComponentSpec]:
    """Returns the idle components with choice `auto` that fit and stay."""
    staying = sorted((part for part in idle if part.choice == "auto"), key=lambda part: part.size)
    all_of_them = len(staying)
    while staying and sum(part.size for part in staying) > room:
        staying.pop()
    return staying if len(staying) == all_of_them else [part for part in staying if not part.eager]


def _offload_tier(part: ComponentSpec) -> StorageTier:
    """Tier of a component off the device. Disk replaces memory where host memory is the device."""
    if part.choice == "auto" or part.choice == "device" or (part.choice == "memory" and part.fallback == "disk"):
        return part.fallback
    return part.choice


def _describe_tier(place: StorageTier) -> str:
    return {"memory": "in memory", "disk": "on disk"}.get(place, place)


_SHARE = 0.8
_MASTER = 4  # bytes of an fp32 master weight


def estimate_component_sizes(
    stage: StageConfig, policy: PolicyModel, precision: str, explorers: Sequence[StageConfig] | None = None
) -> dict[str, int]:
    """Bytes of each component of the stage, and of `gradients`, before any is built; 0 for the engine's cache
    (unknown).

    Args:
        explorers: the stage as each explorer sees it that shares the device from another process; None: there are none.
    """
    model: Any = policy.model
    needs = component_phases(stage, elsewhere=explorers is not None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = {
        "policy": _weight_bytes(model.parameters()),
        "optimizer": _adam_state_bytes(trained, stage.trainer.optimizer),
        "gradients": _weight_bytes(trained),
    }
    if "reference" in needs and not has_lora(model):
        sizes["reference"] = sizes["policy"]
    if "teacher" in needs and stage.algorithm.teacher_folder is None and not has_lora(model):
        sizes["teacher"] = sizes["policy"]
    if "critic" in needs:
        assert stage.algorithm.active_critic is not None
        own = stage.algorithm.active_critic.network == "own"
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, device="meta")
        copied = [*(model.base_model.parameters() if own else []), *head.parameters()]
        learning = [parameter for parameter in copied if parameter.requires_grad]
        states = _adam_state_bytes(learning, stage.trainer.optimizer)
        sizes |= {"critic": _weight_bytes(copied), "critic_optimizer": states}
        sizes["gradients"] = max(sizes["gradients"], _weight_bytes(learning))
    if stage.algorithm.teacher_folder is not None:
        taught = build_meta_model(stage.algorithm.teacher_folder)
        sizes["teacher"] = sum(_MASTER * each.numel() for each in taught.parameters())
    if scorers := loaded_reward_models(reward_models(stage), str(policy.device)):
        sizes["rewards"] = sum(each.nbytes for scorer in scorers for each in scorer.model.parameters())
    if cast := _cast_bytes(model, precision, stage.engine):
        sizes["cast"] = cast
    sizes["cache"] = 0
    if explorers is not None:
        sizes["engine"] = sum(_explorer_bytes(each, model, precision, sizes.get("rewards", 0)) for each in explorers)
    elif isinstance(stage.engine, VLLMEngineConfig):
        sizes["engine"] = vllm_bytes(stage.engine, model, precision)
    return {name: size for name, size in sizes.items() if name in needs or name == "gradients"}


def vllm_bytes(engine: VLLMEngineConfig, model: nn.Module, precision: str) -> int:
    """Size of vLLM's process: its weights in `precision`, without adapters, and its keys and values."""
    width = 2 if precision == "bf16" else 4
    adapters = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    weights = width * (count_weights(model) - adapters)
    return weights + int(engine.cache_gb * 2**30)


def _explorer_bytes(stage: StageConfig, model: nn.Module, precision: str, rewards: int) -> int:
    """Size of what an explorer in another process holds: its copy of the weights, its engine, its reward models."""
    engine = stage.engine
    if isinstance(engine, VLLMEngineConfig):
        return vllm_bytes(engine, model, precision) + rewards
    return _weight_bytes(model.parameters()) + _cast_bytes(model, precision, engine) + rewards


def default_memory_budget(device: torch.device) -> float:
    """Default budget: a share of the device's memory, in bytes."""
    if device.type == "cuda":
        return _SHARE * torch.cuda.get_device_properties(device).total_memory
    return _SHARE * psutil.virtual_memory().total


def _cast_bytes(model: nn.Module, precision: str, engine: EngineSection) -> int:
    """Size of the engine's copy (engines/native/weights.py): cast weights in bf16, merged weights in fp32, and those
    that it multiplies in 8 bits."""
    if isinstance(engine, NativeEngineConfig) and engine.weights == "int8":
        rounded = {id(layer.weight): layer.weight.numel() for layer in int8_linears(model).values()}
        width, has_own = (2, torch.bfloat16) if precision == "bf16" else (4, torch.float32)
        own_adapters = bool(adapted_layers(model)) and not merges_adapters(model)
        copied = [
            each.numel()
            for name, each in model.named_parameters()
            if (own_adapters if ".lora_" in name else id(each) not in rounded and each.dtype != has_own)
        ]
        return sum(rounded.values()) + width * sum(copied)
    if adapted_layers(model) and not merges_adapters(model):
        width = 2 if precision == "bf16" else 4
        floats = [each for each in model.parameters() if each.is_floating_point()]
        return sum(width * each.numel() for each in floats if each.requires_grad or each.element_size() != width)
    if precision == "bf16":
        adapted = {id(layer.base_layer.weight) for layer in adapted_layers(model).values()}
        cast = (each for name, each in model.named_parameters() if ".lora_" not in name)
        return sum(2 * each.numel() for each in cast if each.dtype != torch.bfloat16 or id(each) in adapted)
    return _weight_bytes(layer.base_layer.weight for layer in adapted_layers(model).values())


def _weight_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(each.element_size() * each.numel() for each in parameters)


def _adam_state_bytes(parameters: Iterable[torch.Tensor], optimizer: str) -> int:
    """Size of two moments of each weight, and a step count of each tensor."""
    trained = list(parameters)
    if optimizer == "adamw_8bit":  # codes, and a scale per block
        moments = 2 * (MOMENT_BLOCK + _MASTER) * sum(-(-each.numel() // MOMENT_BLOCK) for each in trained)
    else:
        moments = 2 * _weight_bytes(trained)
    return moments + _MASTER * len(trained)
