"""Chooses compute type and threads by timing the matrix products of a training step.

A step passes all its rows through every linear layer: decoding, a few rows at a time and forward only; learning, many
rows forward and backward. Which type or number of threads is faster depends on both the shape and the rows, so each
distinct product is timed as the step runs it, and counts as often as the step repeats it.

What was measured is kept in the cache folder: on a busy machine a second measurement may differ, and the same run file
would compute in another type.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import linear

from rollmill.files import cache_folder, temporary_path

CPU_ROW = 2048
"""Most tokens of a row on a CPU: keeps activations near the caches."""

_FLOP = 4e9
"""Most operations of a timed pass: wide layers are timed by a slice of their outputs, never with fewer rows."""
_WEIGHTS = 1 << 25
"""Most weights of a timed layer: 128 MiB in fp32, more than caches hold."""
_MAX_REPEATS, _ENOUGH_S = 10, 0.15
_BACKWARD = 3  # operations of a forward and backward pass, in forward passes


@dataclass(frozen=True)
class StepSize:
    """Rows that a training step passes through a model's layers."""

    sequences: int = 64  #: completions decoded at the same time
    decoded: int = 64  #: forward passes of one row per sequence; 0: the step generates nothing
    learned: int = CPU_ROW  #: rows that are run forward and backward; 0: nothing is learned
    row: int = CPU_ROW  #: most rows of one such pass

    @classmethod
    def of_training(cls, micro_batch_tokens: int = CPU_ROW) -> StepSize:
        """Returns the size of a step that only learns."""
        return cls(decoded=0, row=min(CPU_ROW, micro_batch_tokens))

    @classmethod
    def of_generation(cls, sequences: int = 64) -> StepSize:
        """Returns the size of a step that only generates."""
        return cls(sequences=sequences, learned=0)


@dataclass(frozen=True)
class Product:
    """A matrix product [rows, narrow] x [narrow, wide] that a step repeats."""

    wide: int
    narrow: int
    rows: int
    learns: bool  #: forward and backward under autocast from fp32 weights; else forward with weights of the type


Timer = Callable[[Product, tuple[torch.dtype | None, ...]], list[float]]
"""Seconds of a product in each compute type; None is fp32."""


def step_products(model: nn.Module, size: StepSize) -> dict[Product, float]:
    """Returns the distinct products of a step with their numbers of repetitions, by the model's linear layers."""
    shapes = Counter(
        (module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)
    )
    products: dict[Product, float] = {}
    rows = min(size.row, size.learned)
    for (wide, narrow), count in shapes.items():
        if size.decoded:
            products[Product(wide, narrow, size.sequences, learns=False)] = count * size.decoded
        if rows:
            products[Product(wide, narrow, rows, learns=True)] = count * size.learned / rows
    return products


def choose_precision(
    model: nn.Module, device: torch.device | str, size: StepSize | None = None, timer: Timer | None = None
) -> Literal["fp32", "bf16"]:
    """Chooses the faster compute type over fp32 master weights.

    bf16 on a GPU. On a CPU, whichever runs the step's matrix products at least 10 % faster (bf16 if the CPU multiplies
    it in hardware, else fp32). Takes one or two seconds for models of 0.1B parameters, once on each machine.

    Args:
        size: of the run's step; default: 64 completions of 64 tokens, which are learned from.
        timer: measures one product; default: on this machine.
    """
    if torch.device(device).type != "cpu":
        return "bf16"
    fp32, bf16 = _step_seconds(model, size or StepSize(), (None, torch.bfloat16), timer or time_product)
    return "bf16" if bf16 < 0.9 * fp32 else "fp32"


def choose_threads(model: nn.Module, size: StepSize | None = None, timer: Timer | None = None) -> int:
    """Chooses the thread count of 1, 2, 4, ... up to the available CPUs that runs a step's products fastest.

    Each count is measured in its faster type. More threads are chosen only if each doubling is at least 20 % faster.
    The current thread count is not changed. Arguments as in `choose_precision`.
    """
    best, best_seconds = 1, float("inf")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1
    while threads <= cpus:
        with _threads(threads):
            seconds = min(_step_seconds(model, size or StepSize(), (None, torch.bfloat16), timer or time_product))
        if seconds > best_seconds / 1.2:
            break
        best, best_seconds, threads = threads, seconds, threads * 2
    return best


def _step_seconds(
    model: nn.Module, size: StepSize, dtypes: tuple[torch.dtype | None, ...], timer: Timer
) -> Sequence[float]:
    """Time of all products of a step, in each type."""
    totals = [0.0] * len(dtypes)
    for product, count in step_products(model, size).items():
        for at, seconds in enumerate(timer(product, dtypes)):
            totals[at] += count * seconds
    return totals


def time_product(product: Product, dtypes: tuple[torch.dtype | None, ...]) -> list[float]:
    """Returns the best time of a product in each type with the current number of threads, in seconds.

    It is measured once for a kind of CPU and a version of torch, and then read from the cache folder.
    """
    return _time_once(product, dtypes, torch.get_num_threads(), cache_folder("timings"))


@cache
def _time_once(product: Product, dtypes: tuple[torch.dtype | None, ...], threads: int, folder: Path) -> list[float]:
    types = ["fp32" if each is None else str(each).removeprefix("torch.") for each in dtypes]
    what = json.dumps([asdict(product), types, threads, torch.__version__, _cpu()], sort_keys=True)
    record = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"
    for _ in range(2):  # another process may have been first
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(record.read_text())
            if known["of"] == json.loads(what):
                return [float(each) for each in known["seconds"]]
        seconds = _measure(product, dtypes)
        temporary = temporary_path(record)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"of": json.loads(what), "seconds": seconds}) + "\n")
            os.link(temporary, record)  # unlike a rename, never replaces one
        except FileExistsError:
            continue
        except OSError:  # a cache that cannot be written
            pass
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return seconds
    return seconds  # beside a damaged record


@cache
def _cpu() -> list[str]:
    """The CPU's name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return [fields.get("model name", platform.machine()), fields.get("flags", fields.get("Features", ""))]


def _measure(product: Product, dtypes: tuple[torch.dtype | None, ...]) -> list[float]:
    """Types alternate, so that other load affects all."""
    operations = 2 * product.rows * product.narrow * (_BACKWARD if product.learns else 1)
    wide = min(product.wide, max(64, min(int(_FLOP / operations), _WEIGHTS // product.narrow)))
    run = _learn if product.learns else _decode
    passes = [run(product, wide, dtype) for dtype in dtypes]
    best = [float("inf")] * len(dtypes)
    began = time.perf_counter()
    for repeat in range(_MAX_REPEATS):
        if repeat and time.perf_counter() - began > _ENOUGH_S:
            break
        for at, each in enumerate(passes):
            start = time.perf_counter()
            each()
            best[at] = min(best[at], time.perf_counter() - start)
    return [seconds * product.wide / wide for seconds in best]


def _learn(product: Product, wide: int, dtype: torch.dtype | None) -> Callable[[], None]:
    """A forward and backward pass under autocast."""
    weight = torch.full((wide, product.narrow), 0.01, requires_grad=True)
    x = torch.full((product.rows, product.narrow), 0.01, requires_grad=True)
    gradient = torch.full((product.rows, wide), 0.01, dtype=dtype)

    def run() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = linear(x, weight)
        torch.autograd.grad(y, (x, weight), gradient)

    return run


def _decode(product: Product, wide: int, dtype: torch.dtype | None) -> Callable[[], None]:
    """A forward pass with weights that were cast before."""
    weight = torch.full((wide, product.narrow), 0.01, dtype=dtype)
    x = torch.full((product.rows, product.narrow), 0.01, dtype=dtype)

    @torch.inference_mode()
    def run() -> None:
        linear(x, weight)

    return run


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
