"""Kinds of GPUs by the figures of their data sheets, and the kind of a GPU that is here."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
MEMORY_USABLE = 0.9
"""Share of a GPU's memory that is planned with; the rest is for what is split into pieces that nothing fits into."""
_CLOSE = 0.03


def nominal_memory(name: str, total: float) -> float:
    """Bytes of a GPU by its data sheet, which are the same for all GPUs of a kind, whatever its driver reports.

    Args:
        name: as the driver says it, such as NVIDIA H200.
        total: bytes that the driver reports; they count if the kind is unknown, or has more.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    sizes = [kind.memory for key, kind in GPU_KINDS.items() if key.split("-")[0] in words]
    return max((size for size in sizes if size * (1 - _CLOSE) <= total), default=total)
