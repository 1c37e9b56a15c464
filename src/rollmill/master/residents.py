"""The residency of a stage: its plan, and what follows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rollmill.config.residency_checks import REMADE, model_rewards, needs_of, phases_of
from rollmill.config.run import StageConfig
from rollmill.core.errors import ConfigError
from rollmill.engines.native import NativeEngine
from rollmill.master.context import RunContext
from rollmill.models.load import Policy
from rollmill.residency import Part, Plan, Remade, Residency, Resident, Tensors, make_plan
from rollmill.residency.copies import Copies, FileCopies, PinnedCopies
from rollmill.residency.plan import GB, GRADIENTS, Where
from rollmill.residency.residency import CAST, POLICY
from rollmill.residency.resident import InThread
from rollmill.residency.sizes import machine_budget, sizes_of
from rollmill.rewards.model import scorers_in_memory
from rollmill.trainer import Trainer

_FROZEN = ("reference", "teacher", "rewards")


def plan_of(stage: StageConfig, policy: Policy, precision: str) -> Plan:
    """The plan of a stage whose `residency` is not `none`.

    Raises:
        ConfigError: what a phase needs is more than the budget.
    """
    chosen, device = stage.residency, policy.device
    assert chosen is not None
    needs, sizes = needs_of(stage), sizes_of(stage, policy, precision)
    out: Where = "memory" if device.type == "cuda" else "disk"
    if precision == "bf16":  # the cast is all that rollouts decode with
        needs["policy"] -= {"rollout"}
    parts = [Part(GRADIENTS, sizes[GRADIENTS], frozenset({"train"}), "destroyed", "destroyed")]
    for name, size in sizes.items():
        if name != GRADIENTS:
            away = "destroyed" if name in REMADE else out
            parts.append(Part(name, size, needs[name], getattr(chosen, name), away, eager=name == "cache"))
    budget = machine_budget(device) if chosen.budget_gb is None else chosen.budget_gb * GB
    plan = make_plan(parts, phases_of(stage), budget, where=f"stage {stage.name}: ")
    casting = sizes["policy"] + sizes.get(CAST, 0)
    if "rollout" in plan.places and plan.places["rollout"][POLICY] != "device" and casting > budget:
        raise ConfigError(
            f"stage {stage.name}: residency.budget_gb: the budget is {budget / GB:.3g} GB, and the phase `rollout` "
            f"begins with the policy and the engine's cast of it, {casting / GB:.3g} GB; raise budget_gb"
        )
    return plan


def residency_of(
    stage: StageConfig, policy: Policy, trainer: Trainer, engine: NativeEngine, context: RunContext
) -> Residency:
    """What moves the components of a stage whose `residency` is not `none`; all of them are on the device."""
    assert stage.residency is not None
    plan, folder = plan_of(stage, policy, context.precision), stage.residency.folder or context.run_dir
    known = plan.places[phases_of(stage)[0]]

    def copies(name: str) -> Mapping[Where, Copies]:
        file: Mapping[Where, Copies] = {"disk": FileCopies(folder, name.replace("_", " "))}
        return file if policy.device.type == "cpu" else {**file, "memory": PinnedCopies()}

    residents: list[Resident] = [
        Tensors(name, tensors, copies(name), frozen=name in _FROZEN)
        for name, tensors in trainer.held().items()
        if name in known
    ]
    for scorer in scorers_in_memory(model_rewards(stage), str(policy.device)):
        weights = Tensors("rewards", scorer.model.parameters, copies("rewards"), frozen=True)
        scorer.wake = partial(weights.move, "device")
        residents.append(InThread(weights, scorer.thread))
    if "cast" in known:
        residents.append(
            Remade("cast", engine.weights.bytes, destroy=engine.destroy_weights, make=engine.weights.refresh)
        )
    if "cache" in known:
        residents.append(Remade("cache", engine.cache_bytes, destroy=engine.destroy_cache))
    return Residency(residents, plan, policy.device)
