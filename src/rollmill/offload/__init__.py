"""Offloading: moves components between device, host memory and disk, or destroys them, by phase of a step."""

from rollmill.offload.components import Offloadable, OffloadableTensors, RebuildableComponent, offload_tensors
from rollmill.offload.manager import OffloadManager
from rollmill.offload.plan import ComponentSpec, OffloadPlan, plan_offload

__all__ = [
    "ComponentSpec",
    "OffloadManager",
    "OffloadPlan",
    "Offloadable",
    "OffloadableTensors",
    "RebuildableComponent",
    "offload_tensors",
    "plan_offload",
]
