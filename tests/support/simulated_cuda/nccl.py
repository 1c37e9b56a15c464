"""NCCL between simulated GPUs: gloo on the same memory, in the place of the backend "nccl"."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from support.simulated_cuda.build import nccl_module
from support.simulated_cuda.cuda_api import properties

_NAME = "simulated_nccl"
_spec = importlib.util.spec_from_file_location("nccl", nccl_module())
assert _spec is not None
assert _spec.loader is not None
_library: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_library)
_init_process_group = dist.init_process_group


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    store.set(f"gpu of {rank}", properties().uuid)
    gpus = [store.get(f"gpu of {each}") for each in range(size)]
    if len(set(gpus)) < size:
        raise RuntimeError(f"ncclInvalidUsage: Duplicate GPU detected: the ranks are on {gpus}")
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    return _library.wrap(ProcessGroupGloo(store, rank, size, options))


def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """As torch's, with the simulation where "nccl" stands."""
    return _init_process_group(backend.replace("nccl", _NAME) if isinstance(backend, str) else backend, *args, **kwargs)


class ProcessGroupNCCL:
    """In the place of torch's class, for groups apart from the default one."""

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._group = _create(store, rank, size, options._timeout)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        self._group = None  # closes its connections


dist.is_nccl_available = lambda: True
_module: Any = torch._C._distributed_c10d
_module.ProcessGroupNCCL = ProcessGroupNCCL
dist.Backend.register_backend(_NAME, _create, devices=["cuda"])
dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
