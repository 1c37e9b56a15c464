"""Worker: what one core of this machine, or its GPU, can do: matrix products by type, and reading memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from bench.worker import Channel, serve, versions

#: [rows, inputs, outputs] of products; the fastest counts. Rows as in decoding and in training, layers of 0.1M to 4M.
PRODUCTS = ((256, 576, 1536), (256, 1024, 3072), (1024, 1024, 1024), (2048, 512, 1344), (2048, 1024, 4096))
GPU_PRODUCTS = ((256, 4096, 12288), (4096, 4096, 12288), (8192, 8192, 8192))
READ_BYTES = 1 << 30  # more than caches hold
_SECONDS = 0.15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="small products and little memory, for a trial")
    args = parser.parse_args()
    device = args.device
    channel = Channel()

    import torch

    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    if not on_gpu:
        torch.set_num_threads(1)
    products = GPU_PRODUCTS if on_gpu and not args.small else PRODUCTS
    bytes_read = READ_BYTES if not args.small else READ_BYTES >> 6
    buffer = torch.ones(bytes_read // 4, device=device)

    def product(kind: str, rows: int, inputs: int, outputs: int) -> Callable[[], Any]:
        if kind == "int8":
            x = torch.ones(rows, inputs, dtype=torch.int8, device=device)
            weight = torch.ones(outputs, inputs, dtype=torch.int8, device=device).t()
            return lambda: torch._int_mm(x, weight)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        # random on a GPU, whose clock rises with equal numbers
        made = torch.randn if on_gpu else lambda *size, **options: torch.full(size, 0.5, **options)
        left, right = (made(size, inputs, dtype=dtype, device=device) for size in (rows, outputs))
        return lambda: torch.nn.functional.linear(left, right)

    def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        with torch.inference_mode():
            for kind in ("fp32", "bf16") if on_gpu else ("fp32", "bf16", "int8"):
                rates = {}
                for rows, inputs, outputs in products:
                    seconds = best_seconds(product(kind, rows, inputs, outputs), wait)
                    rates[f"{rows} x {inputs} x {outputs}"] = round(2e-9 * rows * inputs * outputs / seconds, 1)
                found[kind] = max(rates.values())
                found[f"{kind} by shape"] = rates
            found["read_gb_s"] = round(1e-9 * bytes_read / best_seconds(buffer.sum, wait), 2)
        return found

    serve(channel, run, versions=versions("torch"))


def best_seconds(work: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """The shortest time of `work`, of as many tries as fit; `wait` returns once the device has done it."""
    work()
    wait()
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        started = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
