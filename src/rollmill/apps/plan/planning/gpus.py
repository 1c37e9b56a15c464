"""Kinds of GPUs: the figures of their data sheets, and the share of them that training and decoding reach."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.errors import ConfigError

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class GPUKind:
    """A kind of GPU. Rates are per second and direction, for one GPU."""

    memory: float  #: bytes
    flops: float  #: dense bf16
    bandwidth: float  #: bytes of its memory
    node_link: float  #: bytes between GPUs of a node
    network: float  #: bytes between nodes


GPU_KINDS = {
    "a10": GPUKind(24e9, 125e12, 0.60e12, 32e9, 12.5e9),
    "l40s": GPUKind(48e9, 362e12, 0.86e12, 32e9, 25e9),
    "a100-40": GPUKind(40e9, 312e12, 1.55e12, 300e9, 25e9),
    "a100": GPUKind(80e9, 312e12, 2.04e12, 300e9, 25e9),
    "h100": GPUKind(80e9, 989e12, 3.35e12, 450e9, 50e9),
    "h200": GPUKind(141e9, 989e12, 4.80e12, 450e9, 50e9),
    "b200": GPUKind(180e9, 2250e12, 7.70e12, 900e9, 50e9),
}
"""NVIDIA's data sheets: SXM modules where there are any, and one network card per GPU."""
FLOPS_REACHED, BANDWIDTH_REACHED, NETWORK_REACHED = 0.4, 0.6, 0.7
"""Shares of the data sheets' rates that are assumed: of a trainer's or a prefill's products, of a decoding pass over
weights and keys and values, and of transfers."""
MEMORY_USABLE = 0.9


def gpu_kind(name: str) -> GPUKind:
    """Look up a kind by name. Raises ConfigError for an unknown one."""
    if name not in GPU_KINDS:
        raise ConfigError(f"--cluster {name}: unknown kind of GPU; choose one of {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name]
