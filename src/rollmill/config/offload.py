"""`residency`: where models and optimizer states are while a phase of the step does not need them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rollmill.config.section import Section

Phase = Literal["rollout", "inference", "train"]
OffloadTarget = Literal["auto", "device", "memory", "disk"]
RebuildPolicy = Literal["auto", "device", "destroyed"]

PHASES: tuple[Phase, ...] = ("rollout", "inference", "train")
"""The phases of a step, in order."""


class OffloadConfig(Section):
    """Where each component is in the phases that do not need it: on the `device`, in host `memory`, on `disk`, or
    `destroyed` and made again. `auto` moves out only what the budget leaves no room for, the largest first. On a CPU
    the device is the memory: there `memory` and `disk` both mean disk."""

    policy: OffloadTarget = "auto"
    """The trained weights. Rollouts need them, too, unless they run on a cast of their own (bf16)."""
    optimizer: OffloadTarget = "auto"
    """The policy's optimizer state, which only the phase `train` needs."""
    reference: OffloadTarget = "auto"
    """The reference model of a KL penalty or a preference loss, which only `inference` needs."""
    critic: OffloadTarget = "auto"
    """The critic's weights, which `inference` and `train` need."""
    critic_optimizer: OffloadTarget = "auto"
    """The critic's optimizer state, which only `train` needs."""
    teacher: OffloadTarget = "auto"
    """The teacher of algorithms `distill`, `jsd` and `self_distill`, which only `train` needs."""
    rewards: OffloadTarget = "auto"
    """Reward models in this process (reward `model`), which `rollout` and `inference` need."""
    cast: RebuildPolicy = "auto"
    """The engine's copy of the weights, in bf16 or with adapters merged, which only `rollout` needs."""
    cache: RebuildPolicy = "auto"
    """The engine's keys and values, which only `rollout` needs. `auto` destroys them in a phase in which anything else
    has to leave."""
    budget_gb: float | None = Field(None, gt=0)
    """What all of these, and gradients, may take together in any phase, in GB (10^9 bytes). Activations and the keys
    and values of running completions come on top. Default: 0.8 of the device's memory."""
    folder: Path | None = None
    """Where files of what is on disk are. They have no names there and vanish with the process. Default: the run
    directory."""


def _named(value: object) -> object:
    """`none` and `auto` stand for no section and a section without keys."""
    if isinstance(value, str):
        return {"none": None, "auto": {}}.get(value, value)
    return value


OptionalOffloadConfig = Annotated[OffloadConfig | None, BeforeValidator(_named)]
"""The section, or `none`, or `auto`."""
