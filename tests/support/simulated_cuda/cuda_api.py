"""Replaces the functions of torch.cuda, and what torch asks elsewhere of a build with CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from support.simulated_cuda.trace import COUNTS, captures, note_sync, refuse_in_capture

_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
DEVICES = (
    int(os.environ.get("SIMULATED_CUDA_DEVICES", "1"))
    if _VISIBLE is None
    else sum(bool(each.strip()) for each in _VISIBLE.split(","))
)
TOTAL = int(float(os.environ.get("SIMULATED_CUDA_GB", "150.75")) * 1e9)
"""Bytes of a device: those of an H200."""
_NAME = "NVIDIA H200 (simulated)"
_SEED = 0x7FFFFFFFFFFFFFFF
_device = torch.ops.simulated_cuda
_device.set_count(DEVICES)
_device.set_total(TOTAL)


def _index(device: Any = None) -> int:
    if device is None:
        return int(_device.current())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(_device.current()) if index is None or index < 0 else index


class Stream:
    """All streams are one, in the order of the program."""

    cuda_stream = stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _index(device))

    def synchronize(self) -> None:
        note_sync("stream.synchronize")

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """Has happened as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        note_sync("event.synchronize")


class Device:
    """In the place of torch.cuda.device."""

    def __init__(self, which: Any) -> None:
        self.idx = _index(which) if which is not None else -1

    def __enter__(self) -> None:
        self.prev = _device.current()
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *_: Any) -> bool:
        _device.set_current(self.prev)
        return False


def set_device(which: Any) -> None:
    index = _index(which)
    if index >= DEVICES:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {DEVICES})")
    _device.set_current(index)


def exchange_device(index: int) -> int:
    before = int(_device.current())
    if index >= 0:
        set_device(index)
    return before


@contextmanager
def use_stream(which: Any) -> Iterator[Any]:
    yield which


def synchronize(device: Any = None) -> None:
    refuse_in_capture("synchronize")
    note_sync("cuda.synchronize")


def properties(device: Any = None) -> Any:
    index = _index(device)
    return SimpleNamespace(
        name=_NAME,
        total_memory=TOTAL,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid=f"simulated-{index if _VISIBLE is None else _VISIBLE.split(',')[index]}",
        L2_cache_size=50 << 20,
        warp_size=32,
        is_integrated=False,
    )


def seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _device.seed(index, int(seed) & _SEED)


def _allocated(device: Any = None) -> int:
    return int(_device.allocated(_index(device)))


def _peak(device: Any = None) -> int:
    return int(_device.peak(_index(device)))


def _capturing() -> bool:
    return bool(captures())


def _nothing() -> Callable[..., None]:
    """A function of its own each time, as torch._dynamo asks."""
    return lambda *_, **__: None


_STATE = torch.zeros(16, dtype=torch.uint8)
REPLACED: dict[str, Any] = {
    "_lazy_init": _nothing(),
    "init": _nothing(),
    "is_available": lambda: DEVICES > 0,
    "is_initialized": lambda: True,
    "_is_compiled": lambda: True,
    "device_count": lambda: DEVICES,
    "_device_count_nvml": lambda: DEVICES,
    "current_device": lambda: int(_device.current()),
    "set_device": set_device,
    "device": Device,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": exchange_device,
    "synchronize": synchronize,
    "Stream": Stream,
    "ExternalStream": Stream,
    "Event": Event,
    "stream": use_stream,
    "StreamContext": use_stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "set_stream": _nothing(),
    "memory_allocated": _allocated,
    "max_memory_allocated": _peak,
    "memory_reserved": _allocated,
    "max_memory_reserved": _peak,
    "reset_peak_memory_stats": lambda device=None: _device.reset_peak(_index(device)),
    "memory_stats": lambda device=None: {
        "allocated_bytes.all.current": _allocated(device),
        "allocated_bytes.all.peak": _peak(device),
    },
    "empty_cache": lambda: COUNTS.update(["empty_cache"]),
    "ipc_collect": _nothing(),
    "mem_get_info": lambda device=None: (TOTAL - _allocated(device), TOTAL),
    "get_device_properties": properties,
    "get_device_name": lambda device=None: _NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True,
    "manual_seed": lambda seed: _device.seed(_device.current(), int(seed) & _SEED),
    "manual_seed_all": seed_all,
    # the simulation has no state to give away: what a program restores is the seed
    "get_rng_state": lambda device="cuda": _STATE.clone(),
    "set_rng_state": _nothing(),
    "get_rng_state_all": lambda: [_STATE.clone()] * DEVICES,
    "set_rng_state_all": _nothing(),
    "is_current_stream_capturing": _capturing,
    "graph_pool_handle": lambda: (0, 0),
}
for _name, _value in REPLACED.items():
    setattr(torch.cuda, _name, _value)
torch.cuda.graphs.is_current_stream_capturing = _capturing  # type: ignore[assignment]
torch.version.cuda = "12.8"
torch.backends.cuda.is_built = lambda: True
for _name, _value in {
    "_cuda_getDeviceCount": lambda: DEVICES,
    "_cuda_getDevice": lambda: int(_device.current()),
    "_cuda_isCurrentStreamCapturing": _capturing,
    "_cuda_getCurrentRawStream": lambda index: 0,
}.items():
    setattr(torch._C, _name, _value)

_resize = torch.UntypedStorage.resize_
_new = torch._C.StorageBase.__new__


def _resize_storage(self: torch.UntypedStorage, size: int) -> Any:
    if self.device.type != "cuda":
        return _resize(self, size)
    view = torch.empty(0, dtype=torch.uint8, device=self.device)
    view.set_(self, 0, (0,), (1,))
    _device.resize_bytes(view, int(size))
    return self


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is not None and torch.device(device).type == "cuda":
        size = int(args[0]) if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return _new(cls, *args, **kwargs, **({} if device is None else {"device": device}))


def _share_storage(self: torch.UntypedStorage, *_: Any) -> tuple[Any, ...]:
    """A handle that other processes can open by `_open_storage`."""
    view = torch.empty(0, dtype=torch.uint8, device=self.device)
    view.set_(self, 0, (self.nbytes(),), (1,))
    handle = f"/proc/{os.getpid()}/fd/{_device.share(view)}".encode()
    return self.device.index, handle, self.nbytes(), 0, b"", 0, b"", False


def _open_storage(cls: Any, device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
    return _device.open_shared(handle.decode(), size, device).untyped_storage()  # type: ignore[no-any-return]


torch.UntypedStorage._share_cuda_ = _share_storage  # type: ignore[method-assign]
torch.UntypedStorage._new_shared_cuda = classmethod(_open_storage)  # type: ignore[assignment]
torch.UntypedStorage._release_ipc_counter = classmethod(lambda *_, **__: None)  # type: ignore[assignment]
torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign, assignment]
torch.UntypedStorage.__new__ = staticmethod(_new_storage)  # type: ignore[assignment]
