"""Components that can leave the device and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from torch import Tensor, UntypedStorage

from rollmill.models.storage import collect_storages, ensure_own_memory, free_storages
from rollmill.offload.plan import StorageTier
from rollmill.offload.stores import OffloadStore, PinnedMemoryStore, TempFileStore

_FROZEN = ("reference", "teacher", "rewards")
"""Components that rarely change."""


class Offloadable(Protocol):
    """A component of a stage. `name` is its key in the run file."""

    name: str

    def bytes(self) -> int:
        """Bytes on the device now."""
        ...

    def move(self, place: StorageTier) -> int:
        """Moves the component there, if it is elsewhere; returns the bytes copied, or freed if it is destroyed."""
        ...

    def copies(self) -> Mapping[int, UntypedStorage]:
        """Copies of offloaded storages, by the address (`_cdata`) of the original storage."""
        ...

    def close(self) -> None:
        """Frees copies off the device."""
        ...


class OffloadableTensors:
    """Weights or an optimizer's state.

    Args:
        tensors: returns the current tensors; an optimizer creates its state in its first step.
        copies: store of each tier that is allowed.
        frozen: the tensors rarely change, so reuse a copy until they do.
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Iterable[Tensor]],
        copies: Mapping[StorageTier, OffloadStore],
        *,
        frozen: bool = False,
    ) -> None:
        self.name = name
        self._tensors, self._copies, self._frozen = tensors, copies, frozen
        self._place: StorageTier = "device"
        self._away: list[UntypedStorage] = []
        self._sizes: list[int] = []
        self._stamps: dict[StorageTier, tuple[tuple[int, int], ...]] = {}

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in collect_storages(self._tensors()))

    def move(self, place: StorageTier) -> int:
        """Raises OffloadError if there is no room; then the component stays."""
        if place == self._place:
            return 0
        moved = self._come()
        return moved if place == "device" else moved + self._leave(place)

    def copies(self) -> Mapping[int, UntypedStorage]:
        if self._place == "device":
            return {}
        held = self._copies[self._place].read()
        return {storage._cdata: copy for storage, copy in zip(self._away, held, strict=True)}

    def close(self) -> None:
        for each in self._copies.values():
            each.close()

    def _come(self) -> int:
        if self._place == "device":
            return 0
        for storage, size in zip(self._away, self._sizes, strict=True):
            storage.resize_(size)
        self._copies[self._place].get(self._away)
        self._place, self._away = "device", []
        return sum(self._sizes)

    def _leave(self, place: StorageTier) -> int:
        tensors = list(self._tensors())
        ensure_own_memory(tensors)
        storages = collect_storages(tensors)
        if not storages:
            return 0
        stamp = tuple((tensor.untyped_storage()._cdata, tensor._version) for tensor in tensors)
        kept = self._frozen and self._stamps.get(place) == stamp
        if not kept:
            self._copies[place].put(storages)
            self._stamps[place] = stamp
        self._away, self._sizes = storages, [storage.nbytes() for storage in storages]
        free_storages(storages)
        self._place = place
        return sum(self._sizes)


def offload_tensors(
    name: str, tensors: Callable[[], Iterable[Tensor]], folder: Path, device: str
) -> OffloadableTensors:
    """Builds a component that can leave a device for a file in `folder`, and a GPU for host memory, too.

    Args:
        device: type of the device.
    """
    file: Mapping[StorageTier, OffloadStore] = {"disk": TempFileStore(folder, name.replace("_", " "))}
    copies = file if device == "cpu" else {**file, "memory": PinnedMemoryStore()}
    return OffloadableTensors(name, tensors, copies, frozen=name in _FROZEN)


class RebuildableComponent:
    """A component that is destroyed and rebuilt from others.

    Args:
        size: returns its current bytes.
        make: builds or updates it.
    """

    def __init__(
        self, name: str, size: Callable[[], int], *, destroy: Callable[[], None], make: Callable[[], None] | None = None
    ) -> None:
        self.name, self.bytes = name, size
        self._destroy, self._make = destroy, make

    def move(self, place: StorageTier) -> int:
        if place == "device":
            if self._make is not None:
                self._make()
            return 0
        freed = self.bytes()
        if freed:
            self._destroy()
        return freed

    def copies(self) -> Mapping[int, UntypedStorage]:
        return {}

    def close(self) -> None:
        """No-op: nothing is kept elsewhere."""


class ThreadBoundComponent:
    """A component used by a thread: it is moved in that thread, after the thread's current work."""

    def __init__(self, inner: Offloadable, thread: Executor) -> None:
        self.name, self._inner, self._thread = inner.name, inner, thread

    def bytes(self) -> int:
        return self._inner.bytes()

    def move(self, place: StorageTier) -> int:
        return self._thread.submit(self._inner.move, place).result()

    def copies(self) -> Mapping[int, UntypedStorage]:
        return self._inner.copies()

    def close(self) -> None:
        self._inner.close()
