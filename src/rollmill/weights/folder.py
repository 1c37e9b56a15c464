"""Transfers weights through a shared folder: whole versions from time to time, and deltas between them.

    FOLDER/000012.whole.safetensors    all tensors of version 12
    FOLDER/000013.delta.safetensors    changes relative to the base version that it names

A file appears under its name once it is complete. Its metadata has the checksum of the resulting weights. After a small
update most weights are equal once rounded to bf16. Deltas compare elements by their bits, so that applying one gives
exactly the new block, including NaNs and signed zeros.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights.buckets import load_tensors, pack_block
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import BlockLayout, compute_checksum

_MAX_DELTA_SHARE = 0.5
"""A tensor is sent whole if its delta would take more than this share of its bytes."""
INDEX_PREFIX, VALUE_PREFIX = "at.", "new."

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_delta(layout: BlockLayout, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Returns the tensors to send: `new.NAME` has the changed bits, `at.NAME` their indices (int32 or int64; all if
    absent).
    """
    found: dict[str, Tensor] = {}
    for name, place in layout.places.items():
        bits = _BITS[place.type.itemsize]
        part = slice(place.start, place.start + place.bytes)
        before, after = old[part].view(bits), new[part].view(bits)
        at = (before != after).nonzero().view(-1)
        wide = torch.int32 if len(after) < 2**31 else torch.int64
        if len(at) * (wide.itemsize + bits.itemsize) > _MAX_DELTA_SHARE * place.bytes:
            found[VALUE_PREFIX + name] = after.clone()
        elif len(at):
            found[INDEX_PREFIX + name], found[VALUE_PREFIX + name] = at.to(wide), after[at]
    return found


def apply_delta(layout: BlockLayout, block: Tensor, delta: Mapping[str, Tensor]) -> None:
    """Updates the old block to the new one, in place."""
    for name, place in layout.places.items():
        if (values := delta.get(VALUE_PREFIX + name)) is None:
            continue
        target = block[place.start : place.start + place.bytes].view(_BITS[place.type.itemsize])
        if (at := delta.get(INDEX_PREFIX + name)) is None:
            target.copy_(values)
        else:
            target[at.long()] = values


_NAME = re.compile(r"(\d{6,})\.(whole|delta)\.safetensors")
_POLL_S = 0.02


class _File(NamedTuple):
    version: int
    kind: str
    path: Path


class FolderSender:
    """Writes versions to a folder.

    Args:
        dtype: type to send floating-point tensors as; None keeps their types. Deltas are small for bfloat16.
        whole_every: write all tensors every this many versions; 1 never writes a delta.
        keep: number of whole versions to keep, with the deltas since them.
    """

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        whole_every: int = 10,
        keep: int = 2,
    ) -> None:
        self.layout = BlockLayout.of(weights, dtype)
        self.bytes_sent = 0
        self._folder, self._every, self._keep = folder, whole_every, keep
        self._block, self._old = (torch.zeros(self.layout.size, dtype=torch.uint8) for _ in range(2))
        self._last: int | None = None
        self._since_whole = 0
        self._began = False

    def send(self, version: int, weights: Mapping[str, Tensor], readers: IPCSender | None = None) -> None:
        self.layout.require(weights, "the trainer's model")
        self._block, self._old = self._old, self._block
        checksum = pack_block(weights, self.layout, self._block, readers=readers)
        metadata = {"checksum": str(checksum), "layout": self.layout.to_json()}
        if not self._began:
            self._forget(version)
            self._began = True
        if not self._is_there() or self._since_whole + 1 >= self._every:
            kind, tensors = "whole", self.layout.tensors(self._block)
            self._since_whole = 0
        else:
            kind, tensors = "delta", compute_delta(self.layout, self._old, self._block)
            metadata["base"] = str(self._last)
            self._since_whole += 1
        self._write(version, kind, tensors, metadata)
        self._remove_old()

    def restore(self) -> None:
        """The version is written whole, since files that a delta is relative to are gone, too."""
        if self._last is not None and not self._is_there():
            tensors, self._since_whole = self.layout.tensors(self._block), 0
            metadata = {"checksum": str(compute_checksum(self.layout, self._block)), "layout": self.layout.to_json()}
            self._write(self._last, "whole", tensors, metadata)

    def _is_there(self) -> bool:
        """True if the last version, and a whole one to start from, have not been removed by somebody."""
        known = list_versions(self._folder)
        return any(each.kind == "whole" for each in known) and known[-1].version == self._last

    def _write(self, version: int, kind: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        from rollmill.files import atomic_write  # engines' environments import this package but lack its dependencies

        data = save(dict(tensors), metadata)
        self._last = None  # after a failure the next version is whole
        atomic_write(self._folder / f"{version:06d}.{kind}.safetensors", data)
        self.bytes_sent += len(data)
        self._last = version

    def close(self) -> None:
        """Keeps the files: a receiver may come later."""

    def _forget(self, first: int) -> None:
        """Removes versions from `first` on, written by a trainer that was ahead of the checkpoint this one resumes
        from.

        Goes from newest to oldest, so that readers see no gaps meanwhile.
        """
        for each in reversed(list_versions(self._folder)):
            if each.version >= first:
                each.path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        known = list_versions(self._folder)
        kept = [each.version for each in known if each.kind == "whole"][-self._keep :]
        for each in known:
            if kept and each.version < kept[0]:
                each.path.unlink(missing_ok=True)


class FolderReceiver:
    """Reads what a FolderSender writes; the last version read is the base of the next delta.

    Args:
        deadline_s: timeout for the first version.
    """

    def __init__(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._layout: BlockLayout | None = None
        self._block = torch.zeros(0, dtype=torch.uint8)
        self._version: int | None = None
        self._read_last: tuple[int, ...] | None = None
        self._fetched: int | None = None  # version in the block, until it is received

    def newest(self) -> int | None:
        return max((each.version for each in list_versions(self._folder)), default=None)

    def has_newer(self) -> bool:
        """True if the newest version is another one than was read: newer, or from a trainer that resumed from a
        checkpoint.
        """
        known = list_versions(self._folder)
        with suppress(FileNotFoundError):
            return bool(known) and _file_identity(known[-1]) != self._read_last
        return False  # removed meanwhile; the next call finds its successor

    def fetch(self, version: int | None = None) -> None:
        """With `version`, fetches that one, which may be older than the current one."""
        ends = time.monotonic() + self._deadline_s
        while (newest := self.newest() if version is None else version) is None or not self._catch_up(newest):
            if time.monotonic() > ends:
                advice = "Is the trainer running, and does it write to the same folder?"
                raise DeadlineError("an engine", f"weights in {self._folder}", self._deadline_s, advice)
            time.sleep(_POLL_S)
        self._fetched = newest

    def receive(self, into: Mapping[str, Tensor], version: int | None = None) -> int:
        """Takes the fetched version, or else fetches like `fetch`."""
        if self._fetched is None:
            self.fetch(version)
        newest, self._fetched = self._fetched, None
        assert self._layout is not None
        assert newest is not None
        self._layout.require(into, "the engine's model")
        load_tensors(self._layout, self._block, into)
        return newest

    def close(self) -> None:
        """No-op: there are no open files."""

    def _catch_up(self, newest: int) -> bool:
        """True if the block is now at version `newest`; False if a file it needs was just removed."""
        with suppress(FileNotFoundError):
            for each in self._route(newest):
                self._read(each)
            return self._version == newest
        return False

    def _route(self, newest: int) -> list[_File]:
        """Returns the files to read: those after the current version, or the last whole version and its successors."""
        known = [each for each in list_versions(self._folder) if each.version <= newest]
        if self._read_last not in [_file_identity(each) for each in known]:
            self._version = None  # removed, or rewritten by a trainer that resumed from a checkpoint
        missing = [each for each in known if self._version is None or each.version > self._version]
        wholes = [n for n, each in enumerate(missing) if each.kind == "whole"]
        if not wholes and self._version is None:
            return []
        return missing[wholes[-1] :] if wholes else missing

    def _read(self, file: _File) -> None:
        with safetensors.safe_open(file.path, "pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        layout = BlockLayout.from_json(metadata["layout"])
        if file.kind == "whole":
            self._layout, self._block = layout, torch.zeros(layout.size, dtype=torch.uint8)
            pack_block(tensors, layout, self._block)
        elif self._layout is None or int(metadata["base"]) != self._version:
            raise WeightSyncError(
                f"{file.path} is a delta to version {metadata['base']}, but the receiver has {self._version}"
            )
        else:
            apply_delta(layout, self._block, tensors)
        if compute_checksum(layout, self._block) != int(metadata["checksum"]):
            raise WeightSyncError(f"{file.path}: the weights do not have the checksum they were sent with")
        self._version, self._read_last = file.version, _file_identity(file)


def _file_identity(file: _File) -> tuple[int, ...]:
    """Identifies a file among those of the same version."""
    stat = file.path.stat()
    return file.version, stat.st_ino, stat.st_mtime_ns


def list_versions(folder: Path) -> list[_File]:
    """Lists the weight files of a folder, oldest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(_File(int(match[1]), match[2], path) for match, path in found if match is not None)
