"""Checkpoints of adapters in a folder of the server, by paths `tinker://RUN/weights/NAME`."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rollmill.apps.serve.tinker.adapters import OPTIMIZER_FILE, AdapterSettings
from rollmill.apps.serve.tinker.wire import TinkerRequestError
from rollmill.errors import CheckpointError
from rollmill.files import sync

Kind = Literal["weights", "sampler_weights"]
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_RUN = re.compile(r"[A-Za-z0-9_:-]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ABOUT = "tinker.json"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A training run: the adapter of one client."""

    run: str
    owner: str  #: name of its client's key
    base_model: str
    settings: AdapterSettings
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint: a folder with an adapter in peft's format, and what is known of it."""

    run: RunInfo
    kind: Kind
    name: str
    folder: Path
    created: datetime
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """Its path for clients."""
        return f"tinker://{self.run.run}/{self.kind}/{self.name}"

    @property
    def has_optimizer(self) -> bool:
        """True if training can go on with the optimizer's state."""
        return (self.folder / OPTIMIZER_FILE).is_file()

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(each.stat().st_size for each in self.folder.iterdir())


class CheckpointStore:
    """The checkpoints in a folder. A client finds its own only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(
        self,
        run: RunInfo,
        kind: Kind,
        name: str,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> SavedCheckpoint:
        """Write a checkpoint beside its place, and move it there.

        Raises:
            TinkerRequestError: the name is no file name, or taken.
            CheckpointError: it cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise TinkerRequestError(f"a checkpoint's name has 1 to 128 letters, digits and . _ -, not {name[:64]!r}")
        target = self._folder / run.run / kind / name
        if target.exists() and not overwrite:
            raise TinkerRequestError(f"there is a checkpoint {name!r} already; choose another name, or overwrite=True")
        writing = target.with_name(f".writing-{uuid.uuid4().hex}")
        created = datetime.now(UTC)
        about = {"run": asdict(run), "created": created.isoformat(), "user_metadata": user_metadata}
        try:
            writing.mkdir(parents=True)
            write(writing)
            (writing / _ABOUT).write_text(json.dumps(about) + "\n")
            for each in writing.iterdir():
                sync(each)
            if target.exists():
                old = target.with_name(f".old-{uuid.uuid4().hex}")
                target.rename(old)
                shutil.rmtree(old, ignore_errors=True)
            writing.rename(target)
            sync(target.parent)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint cannot be written: {error}") from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        return SavedCheckpoint(run, kind, name, target, created, user_metadata)

    def find(self, path: str, owner: str) -> SavedCheckpoint:
        """Find a checkpoint of a client. Raises TinkerRequestError for a wrong path, or if there is none."""
        match = _PATH.fullmatch(path)
        if match is None or not _RUN.fullmatch(match[1]) or not _NAME.fullmatch(match[3]):
            raise TinkerRequestError(f"{path[:200]!r} is no path of a checkpoint: tinker://RUN/weights/NAME")
        kind: Any = match[2]
        found = self._read(self._folder / match[1] / kind / match[3], kind)
        if found is None or found.run.owner != owner:
            raise TinkerRequestError(f"there is no checkpoint {path}")
        return found

    def of_run(self, run: str, owner: str) -> list[SavedCheckpoint]:
        """The checkpoints of a run, the oldest first."""
        if not _RUN.fullmatch(run):
            return []
        found = [each for each in self._in(self._folder / run) if each.run.owner == owner]
        return sorted(found, key=lambda each: each.created)

    def runs(self, owner: str) -> dict[str, list[SavedCheckpoint]]:
        """The runs of a client with checkpoints."""
        names = [each.name for each in self._folder.iterdir()] if self._folder.is_dir() else []
        return {name: found for name in sorted(names) if (found := self.of_run(name, owner))}

    def delete(self, checkpoint: SavedCheckpoint) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def _in(self, folder: Path) -> Iterator[SavedCheckpoint]:
        kinds: tuple[Kind, ...] = ("weights", "sampler_weights")
        for kind in kinds:
            for each in (folder / kind).glob("[!.]*"):
                if (found := self._read(each, kind)) is not None:
                    yield found

    def _read(self, folder: Path, kind: Kind) -> SavedCheckpoint | None:
        try:
            about = json.loads((folder / _ABOUT).read_text())
            run = about["run"]
            info = RunInfo(**{**run, "settings": AdapterSettings(**run["settings"])})
            created = datetime.fromisoformat(about["created"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return SavedCheckpoint(info, kind, folder.name, folder, created, about.get("user_metadata"))
