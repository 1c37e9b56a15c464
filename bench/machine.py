"""Description of the machine of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16")


def describe() -> dict[str, Any]:
    """CPU model, relevant instruction sets, cores, memory in GiB, system and date."""
    model, flags = _cpu()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "flags": [flag for flag in FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def _cpu() -> tuple[str, set[str]]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), set()
    fields = {}
    for line in info.read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields.get("model name", platform.machine()), set(fields.get("flags", fields.get("Features", "")).split())
