"""Transfers weights through shared memory, for processes of one host: the sender copies once, the receiver not at all.

Two files hold one version each. The sender locks the older one, marks it empty, fills it and only then writes version
and checksum; a receiver locks the newer one while it reads or decodes from it. So nobody sees a partial version, and a
process that dies releases its lock. A third file is locked while the sender lives: if it is not locked, the next sender
on this host removes the leftovers.

    file: magic, bytes of the text, version, checksum | checksum kind, layout (JSON) | tensors, from a multiple of 4096
        on
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights.buckets import load_tensors, pack_block
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import XXH3, BlockLayout, compute_checksum

_MAGIC = b"rollmill weights"
_HEADER = struct.Struct("<16sQqQ")
_PAGE = 4096
_EMPTY = -1
_OWNER = ".owner"
_POLL_S = 0.001
_log = logging.getLogger(__name__)


def shared_memory_folder() -> Path:
    """Returns a folder in memory: /dev/shm, or else the folder for temporary files."""
    import tempfile

    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class SharedMemorySender:
    """Creates and fills the two files of `path` (PATH.0 and PATH.1); `close` removes them and PATH.owner.

    Args:
        dtype: type to send floating-point tensors as; None keeps their types.
        checksum: xxh3, or crc32 if the receiver's Python has no xxhash.
        deadline_s: how long a receiver may hold a version that is to be overwritten; then it keeps the memory, and
            the version is written to a new file, so that one that is stopped holds up nobody.
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        checksum: str = XXH3,
        deadline_s: float = 10.0,
    ) -> None:
        self.layout = BlockLayout.of(weights, dtype)
        self._deadline_s, self._checksum, self._next = deadline_s, checksum, 0
        remove_stale_files(shared_memory_folder())
        self._slots: list[_Slot] = []
        self._owner = _Owner(path)
        try:
            for file in slot_files(path):
                self._slots.append(_Slot.made(file, self.layout, checksum))
        except WeightSyncError:
            self.close()
            raise

    def send(self, version: int, weights: Mapping[str, Tensor], readers: IPCSender | None = None) -> None:
        """Waits for a receiver that reads what is to be overwritten, for `deadline_s` at most."""
        self.layout.require(weights, "the trainer's model")
        slot = self._slots[self._next]
        if not slot.lock(fcntl.LOCK_EX, self._deadline_s):
            slot = self._replace(slot)
        try:
            slot.write_version(_EMPTY, 0)
            slot.write_version(version, pack_block(weights, self.layout, slot.block, slot.checksum, readers))
        finally:
            slot.unlock()
        self._next = 1 - self._next

    def restore(self) -> None:
        """No-op: the memory stays mapped."""

    def _replace(self, held: _Slot) -> _Slot:
        """Replaces a file that a receiver does not release. Raises DeadlineError if there is no room for another."""
        from rollmill.files import lock_holder  # engines' environments import this module but may lack its dependencies

        who = f"{lock_holder(held.path)}, which reads its shared weights"
        try:
            made = _Slot.made(held.path, self.layout, self._checksum)
        except WeightSyncError as error:
            advice = f"A new file cannot be made instead: {error}. End that process, or let it continue."
            raise DeadlineError("the trainer", who, self._deadline_s, advice) from error
        _log.warning("the trainer does not wait any longer for %s; newer weights are in a new file", who)
        made.lock(fcntl.LOCK_EX, self._deadline_s)
        self._slots[self._next] = made
        held.close()
        return made

    def close(self) -> None:
        """Removes the files; receivers keep what they have mapped."""
        for slot in self._slots:
            slot.close()
            slot.path.unlink(missing_ok=True)
        self._owner.close()


class SharedMemoryReceiver:
    """Reads what a SharedMemorySender writes at the same path.

    Args:
        verify: check the checksum before a version is used for the first time.
        deadline_s: timeout for the first version.
    """

    def __init__(self, path: Path, *, verify: bool = True, deadline_s: float = 60.0) -> None:
        self._path, self._verify, self._deadline_s = path, verify, deadline_s
        self._slots: list[_Slot] = []
        self._held: _Slot | None = None

    def newest(self) -> int | None:
        if not self._open():
            return None
        return max((found for slot in self._slots if (found := slot.version()[0]) != _EMPTY), default=None)

    def hold(self) -> tuple[int, dict[str, Tensor]]:
        """Returns the newest version and its tensors, which are read-only views of the sender's memory.

        They do not change until the next call, `release` or `close`; the sender waits for that.

        Raises:
            WeightSyncError: the weights are damaged.
            DeadlineError: none arrived in time.
        """
        version, layout, block = self.hold_block()
        return version, layout.tensors(block)

    def hold_block(self, at_least: int = 0) -> tuple[int, BlockLayout, Tensor]:
        """As `hold`, with the block that the tensors are in; waits for a version of at least this number."""
        ends = time.monotonic() + self._deadline_s
        while True:
            found = self._take_newest()
            if found is not None and found >= at_least:
                assert self._held is not None
                return found, self._held.layout, self._held.block
            if time.monotonic() > ends:
                raise self._late()
            time.sleep(_POLL_S)

    def fetch(self) -> None:
        """Raises like `hold`."""
        self.hold()

    def receive(self, into: Mapping[str, Tensor]) -> int:
        version, layout, block = self.hold_block()
        layout.require(into, "the engine's model")
        load_tensors(layout, block, into)
        self.release()
        return version

    def release(self) -> None:
        """Lets the sender overwrite the tensors that `hold` returned."""
        if self._held is not None:
            self._held.unlock()
            self._held = None

    def close(self) -> None:
        self.release()
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _late(self) -> DeadlineError:
        from rollmill.files import lock_holder

        writers = [file for file in slot_files(self._path) if file.is_file()]
        who = f", which {lock_holder(*writers)} writes" if writers else ""
        advice = "Is the trainer running, and does it send to the same path?"
        return DeadlineError("an engine", f"weights at {self._path}{who}", self._deadline_s, advice)

    def _take_newest(self) -> int | None:
        version = self.newest()
        if version is None:
            return None
        slot = next((each for each in self._slots if each.version()[0] == version), None)
        if slot is None:
            return None  # being overwritten: try again
        if slot is self._held:
            return version
        if not slot.lock(fcntl.LOCK_SH, 0.0):
            return None
        if slot.version()[0] != version:
            slot.unlock()
            return None
        if self._verify and compute_checksum(slot.layout, slot.block, slot.checksum) != slot.version()[1]:
            slot.unlock()
            raise WeightSyncError(f"{slot.path}: version {version} does not have the checksum it was sent with")
        self.release()
        self._held = slot
        return version

    def _open(self) -> bool:
        """Maps the files, again if a sender has created new ones."""
        with suppress(FileNotFoundError):
            if [each.identity for each in self._slots] != [os.stat(file).st_ino for file in slot_files(self._path)]:
                opened = [_Slot(file) for file in slot_files(self._path)]
                self.close()
                self._slots = opened
        return bool(self._slots)


def slot_files(path: Path) -> list[Path]:
    """The two files of a path."""
    return [path.with_name(f"{path.name}.{n}") for n in range(2)]


def remove_stale_files(folder: Path) -> None:
    """Removes files left by killed senders in a folder for shared weights; those of live senders stay."""
    for owner in [*folder.glob(f"rollmill-*{_OWNER}"), *folder.glob(f"rollmill-*/*{_OWNER}")]:
        with suppress(OSError), owner.open() as file:  # another user's; gone; or locked by a live sender
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in (*slot_files(owner.with_name(owner.name.removesuffix(_OWNER))), owner):
                path.unlink(missing_ok=True)
            if owner.parent != folder:  # the folder of one engine
                shutil.rmtree(owner.parent, ignore_errors=True)


class _Owner:
    """A file beside those of a path, locked until this process closes it or ends."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + _OWNER)
        temporary = path.with_name(f".{self._path.name}.{os.getpid()}")
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else knows this file yet
        os.replace(temporary, self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)


class _Slot:
    """One memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR)
        self.identity = os.fstat(self._file).st_ino
        self._map = mmap.mmap(self._file, 0)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        magic, length, _, _ = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise WeightSyncError(f"{path} is not a file of shared weights")
        self.checksum, _, layout = self._map[_HEADER.size : _HEADER.size + length].decode().partition("\n")
        self.layout = BlockLayout.from_json(layout)
        self.block = whole[_begin(length) :]

    @classmethod
    def made(cls, path: Path, layout: BlockLayout, checksum: str) -> _Slot:
        """Creates a file, which appears under its name once it is complete."""
        text = f"{checksum}\n{layout.to_json()}".encode()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, _begin(len(text)) + max(layout.size, 1))
            os.write(file, _HEADER.pack(_MAGIC, len(text), _EMPTY, 0) + text)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            size = f"{layout.size / 1e6:.0f} MB"
            raise WeightSyncError(
                f"{path}: {error.strerror}. Two versions of {size} have to fit; free some space there"
            ) from error
        finally:
            os.close(file)
        return cls(path)

    def version(self) -> tuple[int, int]:
        """Version and checksum of the contents."""
        _, _, version, sum_ = _HEADER.unpack_from(self._map)
        return version, sum_

    def write_version(self, version: int, sum_: int) -> None:
        """Records version and checksum of the contents."""
        length = _HEADER.unpack_from(self._map)[1]
        _HEADER.pack_into(self._map, 0, _MAGIC, length, version, sum_)

    def lock(self, kind: int, seconds: float) -> bool:
        """Tries to lock the file within this time; returns whether it did."""
        ends = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= ends:
                    return False
                time.sleep(_POLL_S)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file; the mapping stays as long as a tensor uses it."""
        self.unlock()
        os.close(self._file)


def _begin(length: int) -> int:
    return -(-(_HEADER.size + length) // _PAGE) * _PAGE
