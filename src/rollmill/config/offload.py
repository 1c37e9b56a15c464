"""`offload`: offloading of models and optimizer states in phases that do not need them."""

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
    """Placement of each component in the phases that do not need it: on the `device`, in host `memory`, on `disk`, or
    `destroyed` and rebuilt. `auto` offloads only what does not fit the budget, the largest first. On a CPU the device
    is the memory: there `memory` and `disk` both mean disk."""

    policy: OffloadTarget = "auto"
    """The trained weights. Rollouts need them, too, unless they run on a separate cast (bf16)."""
    optimizer: OffloadTarget = "auto"
    """The policy's optimizer state, needed only in `train`."""
    reference: OffloadTarget = "auto"
    """The reference model of a KL penalty or a preference loss, needed only in `inference`."""
    critic: OffloadTarget = "auto"
    """The critic's weights, needed in `inference` and `train`."""
    critic_optimizer: OffloadTarget = "auto"
    """The critic's optimizer state, needed only in `train`."""
    teacher: OffloadTarget = "auto"
    """The teacher of algorithms `distill`, `jsd` and `self_distill`, needed only in `train`."""
    rewards: OffloadTarget = "auto"
    """Reward models in this process (reward `model`), needed in `rollout` and `inference`."""
    cast: RebuildPolicy = "auto"
    """The engine's copy of the weights, in bf16 or with merged adapters, needed only in `rollout`."""
    cache: RebuildPolicy = "auto"
    """The engine's KV cache, needed only in `rollout`. `auto` destroys it in a phase in which another component has to
    be offloaded."""
    engine: RebuildPolicy = "auto"
    """The process of engine `vllm`, with its weights and its KV cache (engine.cache_gb), needed only in `rollout`.
    `destroyed` ends it; the next request starts it again, with the newest weights. With explorers in other processes:
    all that each of them holds. The weights and reward models of native explorers then go to host memory from a GPU, to
    disk from a CPU; it needs max_staleness 0."""
    shared_by: int | None = Field(None, ge=0)
    """Number of explorers in other processes that share the trainer's device, so that the budget counts what they hold.
    Default: on Ray all without a GPU of their own, else 1."""
    budget_gb: float | None = Field(None, gt=0)
    """Maximum memory of all components and gradients in any phase, in GB (10^9 bytes). Activations and the KV cache of
    running completions come on top. Default: 0.8 of the device's memory."""
    folder: Path | None = None
    """Folder of components on disk. The files are unlinked and vanish with the process. Default: the run directory."""


def _named(value: object) -> object:
    """Expands `none` to no section and `auto` to a section without keys."""
    if isinstance(value, str):
        return {"none": None, "auto": {}}.get(value, value)
    return value


OptionalOffloadConfig = Annotated[OffloadConfig | None, BeforeValidator(_named)]
"""The section, or `none`, or `auto`."""
