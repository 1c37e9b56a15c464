"""CUDA graphs: operations inside of a capture are recorded and run nothing, a replay runs them on the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from support.simulated_cuda.trace import (
    COUNTS,
    StreamCaptureError,
    captures,
    host_wait,
    is_view,
    note_launches,
    note_sync,
    refuse_in_capture,
    where,
)


class CUDAGraph:
    """In the place of torch.cuda.CUDAGraph. `ops` holds what it replays: function, arguments, result and line."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.ops: list[tuple[Any, Any, Any, Any, str]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self) -> None:
        self.ops = []

    def replay(self) -> None:
        COUNTS["graph replays"] += 1
        note_launches("graph replay", 1)
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, recorded, _ in self.ops:
                found = func(*args, **kwargs)
                for old, new in zip(tree_flatten(recorded)[0], tree_flatten(found)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Graph:
    """In the place of torch.cuda.graph."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        COUNTS["graph captures"] += 1
        note_sync("cuda.synchronize")
        COUNTS["empty_cache"] += 1  # as torch.cuda.graph does
        self._recorder = _Recorder(self._graph)
        captures().append(self._graph)
        self._recorder.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._recorder.__exit__(kind, error, trace)
        captures().pop()
        if isinstance(error, StreamCaptureError):  # what the end of an invalid capture says
            text = f"CUDA error: operation failed due to a previous error during capture [{error}]"
            raise RuntimeError(text) from error
        if error is not None:
            return
        with torch.no_grad():  # nothing has been computed yet
            for func, _, _, result, _ in self._graph.ops:
                writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns)
                for each in tree_flatten(result)[0] if not writes and "unsafe_view" not in str(func) else []:
                    if isinstance(each, torch.Tensor) and each.is_floating_point():
                        each.fill_(float("nan"))


class _Recorder(TorchDispatchMode):
    """Records operations. What they return has the right shape; what they would write is not written."""

    def __init__(self, recorded: CUDAGraph) -> None:
        super().__init__()
        self._graph = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name == "aten::copy_" and args[0].is_cuda != args[1].is_cuda:
            refuse_in_capture("copy between host and device")
        written = [
            args[number] if number < len(args) else kwargs.get(each.name)
            for number, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if written:
            result = None if not schema.returns else written[0] if len(written) == 1 else tuple(written)
        else:
            result = func(*args, **kwargs)
            if (kind := host_wait(func, args, kwargs, result)) is not None:
                refuse_in_capture(kind)
        if not is_view(func):
            self._graph.ops.append((func, args, kwargs, result, where()))
        return result


torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CUDAGraph  # type: ignore[misc, assignment]
torch.cuda.graph = torch.cuda.graphs.graph = Graph  # type: ignore[misc, assignment]
