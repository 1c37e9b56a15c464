"""Builds the offload plan of a stage (section `offload`) and the manager that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from rollmill.config.checks.offload import (
    RANKED_COMPONENTS,
    REBUILT_COMPONENTS,
    component_phases,
    explorers_on_device,
    reward_models,
    stage_phases,
)
from rollmill.config.engines import EngineConfig
from rollmill.config.run import StageConfig
from rollmill.engines.native import NativeEngine
from rollmill.errors import ConfigError
from rollmill.models.load import PolicyModel
from rollmill.models.quantization import is_quantized
from rollmill.offload import (
    ComponentSpec,
    OffloadManager,
    OffloadPlan,
    RebuildableComponent,
    offload_tensors,
    plan_offload,
)
from rollmill.offload.components import ThreadBoundComponent
from rollmill.offload.manager import CAST, POLICY
from rollmill.offload.plan import GB, GRADIENTS, StorageTier, default_memory_budget, estimate_component_sizes
from rollmill.rewards.builtin.model import loaded_reward_models
from rollmill.trainer import Trainer
from rollmill.trainer.distributed.trainer import DistributedTrainer

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


def build_offload_plan(
    stage: StageConfig, policy: PolicyModel, precision: str, engines: Sequence[EngineConfig | None] | None = None
) -> OffloadPlan:
    """Build the offload plan of a stage whose `offload` is not `none`.

    Args:
        engines: those of explorers in other processes; see `engines_on_device`.

    Raises:
        ConfigError: a phase needs more than the budget.
    """
    chosen, device = stage.offload, policy.device
    assert chosen is not None
    explorers = None if engines is None else explorers_on_device(stage, engines)
    needs = component_phases(stage, elsewhere=explorers is not None)
    sizes = estimate_component_sizes(stage, policy, precision, explorers)
    out: StorageTier = "memory" if device.type == "cuda" else "disk"
    whole = stage.trainer.param_dtype != "bf16" and not is_quantized(policy.model)
    if precision == "bf16" and whole:  # the cast is all that rollouts decode with
        needs["policy"] -= {"rollout"}
    if stage.trainer.ranks > 1 and device.type == "cpu":  # where ranks share the memory; GPUs are their own
        sizes |= {name: size * stage.trainer.ranks for name, size in sizes.items() if name in RANKED_COMPONENTS}
    parts = [ComponentSpec(GRADIENTS, sizes[GRADIENTS], frozenset({"train"}), "destroyed", "destroyed")]
    for name, size in sizes.items():
        if name != GRADIENTS:
            fallback = "destroyed" if name in REBUILT_COMPONENTS else out
            parts.append(ComponentSpec(name, size, needs[name], getattr(chosen, name), fallback, eager=name == "cache"))
    budget = default_memory_budget(device) if chosen.budget_gb is None else chosen.budget_gb * GB
    plan = plan_offload(parts, stage_phases(stage), budget, where=f"stage {stage.name}: ")
    casting = sizes["policy"] + sizes.get(CAST, 0)
    if "rollout" in plan.places and plan.places["rollout"][POLICY] != "device" and casting > budget:
        raise ConfigError(
            f"stage {stage.name}: offload.budget_gb: the budget is {budget / GB:.3g} GB, and the phase `rollout` "
            f"begins with the policy and the engine's cast of it, {casting / GB:.3g} GB; raise budget_gb"
        )
    return plan


def build_offloader(stage: Stage, plan: OffloadPlan) -> OffloadManager:
    """Build the offload manager of this process; all components are on the device."""
    config, policy, context = stage.config, stage.policy, stage.context
    assert config.offload is not None
    trainer = cast("Trainer | DistributedTrainer", stage.trainer)  # others are refused
    folder = config.offload.folder or context.run_dir
    known = plan.places[stage_phases(config)[0]]

    components = [each for each in trainer.offloadable(folder) if each.name in known]
    for scorer in loaded_reward_models(reward_models(config), str(policy.device)):
        weights = offload_tensors("rewards", scorer.model.parameters, folder, policy.device.type)
        scorer.wake = partial(weights.move, "device")
        components.append(ThreadBoundComponent(weights, scorer.thread))
    engine = cast(
        NativeEngine, stage.engine
    )  # others have no cast or cache here, and `Stage.offload_other_processes` frees them
    if "cast" in known:
        components.append(
            RebuildableComponent(
                "cast", engine.core.weights.bytes, destroy=engine.core.destroy_weights, make=engine.core.weights.refresh
            )
        )
    if "cache" in known:
        components.append(RebuildableComponent("cache", engine.core.cache_bytes, destroy=engine.core.destroy_cache))
    return OffloadManager(components, plan, policy.device)
