"""Stores for copies of storages off the device: pinned host memory, or an unnamed file."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor, UntypedStorage

from rollmill.errors import OffloadError
from rollmill.models.storage import storage_bytes

_ALIGNED = 64  # bytes, enough for every type


class OffloadStore(Protocol):
    """Holds the contents of a list of storages."""

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Copies the storages, whose memory may be freed afterwards. Raises OffloadError if there is no room."""
        ...

    def get(self, storages: Sequence[UntypedStorage]) -> None:
        """Fills the storages, which have their size again."""
        ...

    def read(self) -> list[UntypedStorage]:
        """Returns the copies on the host, for reading."""
        ...

    def close(self) -> None:
        """Frees the copies."""
        ...


class PinnedMemoryStore:
    """Stores copies in pinned host memory, which a GPU copies without the CPU. Allocations are reused."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        if [len(each) for each in self._held] != [storage.nbytes() for storage in storages]:
            pinned = torch.cuda.is_available()
            self._held = [torch.empty(each.nbytes(), dtype=torch.uint8, pin_memory=pinned) for each in storages]
        for host, storage in zip(self._held, storages, strict=True):
            host.copy_(storage_bytes(storage), non_blocking=True)
        _synchronise(storages)

    def get(self, storages: Sequence[UntypedStorage]) -> None:
        for host, storage in zip(self._held, storages, strict=True):
            storage_bytes(storage).copy_(host, non_blocking=True)
        _synchronise(storages)

    def read(self) -> list[UntypedStorage]:
        return [host.untyped_storage() for host in self._held]

    def close(self) -> None:
        self._held = []


class TempFileStore:
    """Stores copies in an unnamed file of a folder, so nothing remains when the process ends, however it ends."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder, self._what = folder, what
        self._file: IO[bytes] | None = None
        self._sizes: list[int] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        self._sizes = [storage.nbytes() for storage in storages]
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._file.truncate(self._ends()[-1])
            if hasattr(os, "posix_fallocate"):  # fails at once if the disk is full
                os.posix_fallocate(self._file.fileno(), 0, self._ends()[-1])
            for start, storage in zip(self._starts(), storages, strict=True):
                self._file.seek(start)
                host = storage_bytes(storage).cpu()  # named: `_buffer` keeps an address only
                self._file.write(_buffer(host))
            self._file.flush()
        except OSError as error:
            raise OffloadError(
                f"offload: {self._what} cannot be written to {self._folder}: {error.strerror} "
                f"({sum(self._sizes) / 1e9:.3g} GB); make room there, or give another offload.folder"
            ) from error

    def get(self, storages: Sequence[UntypedStorage]) -> None:
        assert self._file is not None
        for start, storage in zip(self._starts(), storages, strict=True):
            inside = storage_bytes(storage)
            host = inside if inside.device.type == "cpu" else torch.empty_like(inside, device="cpu")
            self._file.seek(start)
            if self._file.readinto(_buffer(host)) != len(host):  # type: ignore[attr-defined]
                raise OffloadError(f"offload: the file of {self._what} in {self._folder} has been cut off")
            if host is not inside:
                inside.copy_(host)

    def read(self) -> list[UntypedStorage]:
        """Maps the file into memory."""
        assert self._file is not None
        mapped = mmap.mmap(self._file.fileno(), self._ends()[-1], access=mmap.ACCESS_COPY)
        return [
            torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start).untyped_storage()
            for start, size in zip(self._starts(), self._sizes, strict=True)
        ]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _ends(self) -> list[int]:
        ends = [0]
        for size in self._sizes:
            ends.append(-(-(ends[-1] + size) // _ALIGNED) * _ALIGNED)
        return ends

    def _starts(self) -> list[int]:
        return self._ends()[:-1]


def _buffer(host: Tensor) -> memoryview:
    """Exposes the memory of a uint8 tensor [n] on the host. (After `numpy()` its storage could no longer be freed.)"""
    return memoryview((ctypes.c_ubyte * len(host)).from_address(host.data_ptr()) if len(host) else b"")


def _synchronise(storages: Sequence[UntypedStorage]) -> None:
    """Waits for queued copies."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
