"""Worker: what one core of this machine can do: matrix products by type, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.worker import Channel, serve, versions

#: [rows, inputs, outputs] of products; the fastest counts. Rows as in decoding and in training, layers of 0.1M to 4M.
PRODUCTS = ((256, 576, 1536), (256, 1024, 3072), (1024, 1024, 1024), (2048, 512, 1344), (2048, 1024, 4096))
READ_BYTES = 1 << 30  # more than caches hold
_SECONDS = 0.15


def main() -> None:
    channel = Channel()

    import torch

    torch.set_num_threads(1)
    buffer = torch.ones(READ_BYTES // 4)

    def product(kind: str, rows: int, inputs: int, outputs: int) -> Callable[[], Any]:
        if kind == "int8":
            x = torch.ones(rows, inputs, dtype=torch.int8)
            weight = torch.ones(outputs, inputs, dtype=torch.int8).t()
            return lambda: torch._int_mm(x, weight)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        left, right = torch.full((rows, inputs), 0.5, dtype=dtype), torch.full((outputs, inputs), 0.5, dtype=dtype)
        return lambda: torch.nn.functional.linear(left, right)

    def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        with torch.inference_mode():
            for kind in ("fp32", "bf16", "int8"):
                rates = {}
                for rows, inputs, outputs in PRODUCTS:
                    seconds = best_seconds(product(kind, rows, inputs, outputs))
                    rates[f"{rows} x {inputs} x {outputs}"] = round(2e-9 * rows * inputs * outputs / seconds, 1)
                found[kind] = max(rates.values())
                found[f"{kind} by shape"] = rates
            found["read_gb_s"] = round(1e-9 * READ_BYTES / best_seconds(buffer.sum), 2)
        return found

    serve(channel, run, versions=versions("torch"))


def best_seconds(work: Callable[[], Any]) -> float:
    """The shortest time of `work`, of as many tries as fit."""
    work()
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
