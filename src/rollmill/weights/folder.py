"""Weights through a folder that both sides see: whole versions from time to time, and between them what changed.

    FOLDER/000012.whole.safetensors    all tensors of version 12
    FOLDER/000013.delta.safetensors    what to change in the version it names as its base

A file appears under its name when it is complete. Its metadata has the checksum of the weights after it.
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
from rollmill.weights.layout import BlockLayout, compute_checksum, pack_block

# What changed between two blocks of weights, in as few bytes as it takes.
#
# After a small update most weights are the same once they are rounded to bf16. Elements that differ are found by their
# bits, so that applying a delta gives exactly the block it was made from, NaNs and signed zeros included.

_MAX_DELTA_SHARE = 0.5
"""A tensor is sent whole where its delta would take more than this share of its bytes."""
INDEX_PREFIX, VALUE_PREFIX = "at.", "new."

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_delta(layout: BlockLayout, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The tensors to send: `new.NAME` has the bits that differ, `at.NAME` where (int32 or int64); none if none does."""
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
    """Turn the old block into the new one."""
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
        dtype: what floating-point tensors are sent as; None leaves each as it is. Deltas are small for bfloat16.
        whole_every: every how many versions all tensors are written; 1 never writes a delta.
        keep: whole versions, with the deltas since them, that stay.
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

    def send(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See WeightSender."""
        self.layout.require(weights, "the trainer's model")
        self._block, self._old = self._old, self._block
        about = {"checksum": str(pack_block(weights, self.layout, self._block)), "layout": self.layout.to_json()}
        if not self._began:
            self._forget(version)
            self._began = True
        if self._last is None or self._since_whole + 1 >= self._every:
            kind, tensors = "whole", self.layout.tensors(self._block)
            self._since_whole = 0
        else:
            kind, tensors = "delta", compute_delta(self.layout, self._old, self._block)
            about["base"] = str(self._last)
            self._since_whole += 1
        from rollmill.files import atomic_write  # engines' environments import this package, and lack that one

        data = save(tensors, about)
        self._last = None  # after a failure the next one is whole
        atomic_write(self._folder / f"{version:06d}.{kind}.safetensors", data)
        self.bytes_sent += len(data)
        self._last = version
        self._remove_old()

    def close(self) -> None:
        """The files stay: a receiver may come later."""

    def _forget(self, first: int) -> None:
        """Remove what a trainer has written that was ahead of the checkpoint this one begins from; the newest first, so
        that what a reader sees meanwhile has no gaps."""
        for each in reversed(list_versions(self._folder)):
            if each.version >= first:
                each.path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        known = list_versions(self._folder)
        kept = [each.version for each in known if each.kind == "whole"][-self._keep :]
        for each in known:
            if each.version < kept[0]:
                each.path.unlink(missing_ok=True)


class FolderReceiver:
    """Reads what a FolderSender writes; what it has read is the base of the deltas that follow.

    Args:
        deadline_s: how long to wait for the first version.
    """

    def __init__(self, folder: Path, *, deadline_s: float = 60.0) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._layout: BlockLayout | None = None
        self._block = torch.zeros(0, dtype=torch.uint8)
        self._version: int | None = None
        self._read_last: tuple[int, ...] | None = None

    def newest(self) -> int | None:
        """See WeightReceiver."""
        return max((each.version for each in list_versions(self._folder)), default=None)

    def has_newer(self) -> bool:
        """Whether there is another version than the one that was read: a newer one, or one of a trainer that has gone
        back to a checkpoint.
        """
        known = list_versions(self._folder)
        with suppress(FileNotFoundError):
            return bool(known) and _file_identity(known[-1]) != self._read_last
        return False  # removed meanwhile; the next look finds what came instead

    def receive(self, into: Mapping[str, Tensor], version: int | None = None) -> int:
        """See WeightReceiver. With `version` that one, which may be older than what is here."""
        ends = time.monotonic() + self._deadline_s
        while (newest := self.newest() if version is None else version) is None or not self._catch_up(newest):
            if time.monotonic() > ends:
                advice = "Is the trainer running, and does it write to the same folder?"
                raise DeadlineError("an engine", f"weights in {self._folder}", self._deadline_s, advice)
            time.sleep(_POLL_S)
        assert self._layout is not None
        self._layout.require(into, "the engine's model")
        with torch.no_grad():
            for name, view in self._layout.tensors(self._block).items():
                into[name].detach().copy_(view)
        return newest

    def close(self) -> None:
        """Nothing is held."""

    def _catch_up(self, newest: int) -> bool:
        """Whether the block has become `newest`; False if a file it needs has just been removed."""
        with suppress(FileNotFoundError):
            for each in self._route(newest):
                self._read(each)
            return self._version == newest
        return False

    def _route(self, newest: int) -> list[_File]:
        """What to read: what came since the version that is here, or the last whole version and what came since."""
        known = [each for each in list_versions(self._folder) if each.version <= newest]
        if self._read_last not in [_file_identity(each) for each in known]:
            self._version = None  # removed, or written again by a trainer that has gone back to a checkpoint
        missing = [each for each in known if self._version is None or each.version > self._version]
        wholes = [n for n, each in enumerate(missing) if each.kind == "whole"]
        if not wholes and self._version is None:
            return []
        return missing[wholes[-1] :] if wholes else missing

    def _read(self, file: _File) -> None:
        with safetensors.safe_open(file.path, "pt") as opened:
            about = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        layout = BlockLayout.from_json(about["layout"])
        if file.kind == "whole":
            self._layout, self._block = layout, torch.zeros(layout.size, dtype=torch.uint8)
            pack_block(tensors, layout, self._block)
        elif self._layout is None or int(about["base"]) != self._version:
            raise WeightSyncError(f"{file.path} changes version {about['base']}, but version {self._version} is here")
        else:
            apply_delta(layout, self._block, tensors)
        if compute_checksum(layout, self._block) != int(about["checksum"]):
            raise WeightSyncError(f"{file.path}: the weights do not have the checksum they were sent with")
        self._version, self._read_last = file.version, _file_identity(file)


def _file_identity(file: _File) -> tuple[int, ...]:
    """What tells a file from another one of the same version."""
    about = file.path.stat()
    return file.version, about.st_ino, about.st_mtime_ns


def list_versions(folder: Path) -> list[_File]:
    """The files of a folder, oldest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(_File(int(match[1]), match[2], path) for match, path in found if match is not None)
