"""The share of a GPU's rates that training and decoding reach, and the kinds of GPUs by name."""

from __future__ import annotations

from rollmill.errors import ConfigError
from rollmill.models.gpu_kinds import GPU_KINDS, GPUKind

GPUS_PER_NODE = 8
FLOPS_REACHED, BANDWIDTH_REACHED, NETWORK_REACHED = 0.4, 0.6, 0.7
"""Shares of the data sheets' rates that are assumed: of a trainer's or a prefill's products, of a decoding pass over
weights and keys and values, and of transfers."""


def gpu_kind(name: str) -> GPUKind:
    """Look up a kind by name. Raises ConfigError for an unknown one."""
    if name not in GPU_KINDS:
        raise ConfigError(f"--cluster {name}: unknown kind of GPU; choose one of {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name]
