"""Counts what a program asks of the device: kernels, and what makes the host wait, by the line that asks."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

COUNTS: Counter[str] = Counter()
"""Captures, replays and emptied caches of this process."""
_OURS = ("/src/rollmill/", "/bench/", "/tests/")
_DYNAMIC = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
    "nonzero_numpy",
}
"""Operations whose result the host has to see, for its shape or value."""
_INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
_NO_KERNEL = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "alias",
    "set_",
    "resize_",
    "is_pinned",
    "lift_fresh",
}
_SEVERAL = {"_varlen_attn": 5}
"""Kernels of operations that start more than one: attention to pages rearranges queries and output for shared heads,
merges the parts of long rows, and clears a state of random numbers."""
_ASYNCHRONOUS = {"h2d pinned", "d2h async"}
_sent: list[tuple[torch.Tensor, torch.Tensor]] = []
_received: list[tuple[torch.Tensor, torch.Tensor]] = []
_open: list[Trace] = []
_capturing = threading.local()


class StreamCaptureError(RuntimeError):
    """What CUDA refuses while a stream is captured."""


class Trace(TorchDispatchMode):
    """Counts operations on CUDA tensors inside of a `with`, and what crosses between host and device.

    `launches` counts kernels, a replayed graph as one. `ops` counts them by operation, `lines` by line. `crossings`
    counts transfers by kind and line: copies between host and device ("d2h", "h2d pageable", ..., and "h2d pinned" and
    "d2h async", for which the host does not wait), and what else makes the host wait ("item", "cuda.synchronize",
    "dynamic shape (nonzero)", ...).
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.ops: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.crossings: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Trace:
        _open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        _open.remove(self)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if on_device(args, kwargs, result):
            kind = host_wait(func, args, kwargs, result)
            if kind is not None:
                self.crossings[kind, where()] += 1
            if count := kernels_of(func):
                self.launches += count
                self.ops[str(func)] += count
                self.lines[where()] += count
        return result

    def transfers(self) -> int:
        """How often data crossed, or the host waited."""
        return sum(self.crossings.values())

    def report(self, steps: int = 1, most: int = 30) -> str:
        """Kernels and transfers per step, the most frequent ones first."""
        lines = [f"{self.launches / steps:.1f} kernels, {self.transfers() / steps:.2f} transfers a step"]
        lines += [
            f"  {count / steps:8.2f}  {kind:28s} {place}" for (kind, place), count in self.crossings.most_common(most)
        ]
        return "\n".join(lines)


def note_sync(kind: str) -> None:
    """Count a transfer or a wait of the host in all open traces. After a wait, all copies before it have been made."""
    for trace in _open:
        trace.crossings[kind, where()] += 1
    if kind not in _ASYNCHRONOUS:
        finish_copies()


def send_later(source: torch.Tensor) -> None:
    """Note that the device reads this host memory at some time before the host's next wait."""
    _sent.append((source, source.clone()))


def receive_later(to: torch.Tensor, values: torch.Tensor) -> None:
    """Fill host memory with garbage until the host's next wait, and then with these values."""
    _received.append((to, values))
    to.fill_(float("nan") if to.is_floating_point() else 0x7F)


def finish_copies() -> None:
    """Make the copies that the host has not waited for. Raises RuntimeError if it has overwritten what they read."""
    while _received:
        to, source = _received.pop(0)
        to.copy_(source)
    while _sent:
        source, was = _sent.pop(0)
        if not torch.equal(_as_bytes(source), _as_bytes(was)):
            raise RuntimeError("pinned memory was overwritten before the host had waited for the copy that reads it")


def note_launches(name: str, count: int) -> None:
    """Count kernels that one operation starts, beyond its own."""
    for trace in _open:
        trace.launches += count
        trace.ops[name] += count


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def captures() -> list[Any]:
    """The graphs that this thread captures, innermost last."""
    if not hasattr(_capturing, "stack"):
        _capturing.stack = []
    stack: list[Any] = _capturing.stack
    return stack


def refuse_in_capture(what: str) -> None:
    """Raise StreamCaptureError while this thread captures."""
    if captures():
        raise StreamCaptureError(f"CUDA error: operation not permitted when stream is capturing ({what}) at {where()}")


def where() -> str:
    """The innermost line of the project, else of transformers."""
    frame, fallback = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if "/simulated_cuda/" not in name:
            if any(root in name for root in _OURS):
                return f"{name.split('/src/')[-1]}:{frame.f_lineno}"
            if fallback == "?" and "transformers" in name:
                fallback = f"transformers/{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return fallback


def on_device(*values: Any) -> bool:
    """True if a CUDA tensor is among the values."""
    return any(isinstance(each, torch.Tensor) and each.is_cuda for each in tree_flatten(values)[0])


def host_wait(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """What an operation on CUDA tensors makes the host wait for, beyond copies and `item`; None: nothing."""
    name = func._schema.name.split("::")[1]
    if not on_device(args, kwargs, result):
        return None
    if name in _DYNAMIC:
        return f"dynamic shape ({name})"
    if name in _INDEXING:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            return "dynamic shape (bool index)"
        if any(not each.is_cuda for each in indices):
            return "h2d pageable (index)"
    if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        return "dynamic shape (repeat_interleave)"
    return None


def is_view(func: Any) -> bool:
    """True if an operation returns views of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def kernels_of(func: Any) -> int:
    """How many kernels an operation starts, at most."""
    name = func._schema.name.split("::")[1]
    return 0 if is_view(func) or name in _NO_KERNEL else _SEVERAL.get(name, 1)
