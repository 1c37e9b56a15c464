"""Manifests of checkpoints: format version, origin, and the size and SHA-256 of every file.

`manifest.json` is written last, so a checkpoint that has one was written whole, and every change since shows. Folders
without one, as other programs write them, cannot be verified. No torch: commands that list checkpoints need none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rollmill
from rollmill.errors import CheckpointError, CorruptFileError, DamagedCheckpointError
from rollmill.files import read_json_object, sync

FORMAT = 1
"""Format of the checkpoints that this version writes. It reads all from 1 to this one."""
MANIFEST = "manifest.json"
STATE = "state.json"
TRAINER = "trainer.pt"
THREADS = 2
"""Files that are hashed at the same time: more would wait for the disk."""
_CHUNK = 1 << 20

Named = Callable[[str], bool]
"""Chooses files by their names."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Origin and files of a checkpoint."""

    format: int
    rollmill: str  #: version that wrote it
    run_id: str
    step: int
    written_at: float  #: seconds since the epoch
    machine: dict[str, Any]  #: the run's machine.json, which can be made again from it
    buffer: dict[str, Any]  #: position of each kind of buffer
    files: dict[str, FileRecord]  #: by path in the folder


def model_files(name: str) -> bool:
    """True for the files that a model is loaded from: all but the run's state and the trainer's."""
    return name not in (STATE, TRAINER)


def write_manifest(folder: Path, *, step: int, machine: dict[str, Any], stores: dict[str, dict[str, Any]]) -> None:
    """Flush all files of a folder to the disk, and write their manifest.

    Args:
        stores: marks of the buffers; what a buffer in memory holds is left out.
    """
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(THREADS) as pool:
        records = list(pool.map(_flushed_record, paths))
    buffer = {kind: {key: mark[key] for key in ("store", "last")} for kind, mark in stores.items()}
    files = {str(path.relative_to(folder)): record for path, record in zip(paths, records, strict=True)}
    run_id, version = machine["run_id"], rollmill.__version__
    manifest = Manifest(FORMAT, version, run_id, step, time.time(), machine, buffer, dict(sorted(files.items())))
    content = asdict(manifest)
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")
    sync(folder / MANIFEST)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inner)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None for a folder that never had one.

    Raises:
        DamagedCheckpointError: the manifest is lost or damaged.
        CheckpointError: it is of a later format, or cannot be read.
    """
    content, how = dict[str, Any](), "has other content than was written"
    with _explained(folder / MANIFEST):
        try:
            content = read_json_object(folder / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            how = "is missing"
        except CorruptFileError:
            pass
    if "rollmill" not in content and not _has_format(folder):
        return None  # another program's folder
    if content.pop("sha256", "") != _digest(content):
        raise DamagedCheckpointError(folder, [f"{MANIFEST} {how}"])
    require_format(folder / MANIFEST, content.get("format"), content["rollmill"])
    return Manifest(**content | {"files": {name: FileRecord(**record) for name, record in content["files"].items()}})


def require_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run's checkpoint, which always has one. Raises like `read_manifest`, and for a folder
    without one: DamagedCheckpointError, or CheckpointError if its state has no format."""
    if (found := read_manifest(folder)) is not None:
        return found
    with _explained(folder / STATE):
        try:
            state = read_json_object(folder / STATE)
        except (FileNotFoundError, NotADirectoryError, CorruptFileError):
            raise DamagedCheckpointError(folder, [f"{MANIFEST} is missing"]) from None
    require_format(folder / STATE, state.get("format"))
    raise AssertionError("a state with a format has a manifest, or is damaged")


def require_format(path: Path, found: Any, version: str = "") -> None:
    """Raise CheckpointError if this version of rollmill does not read the format of a checkpoint's file.

    Args:
        found: the file's key `format`.
        version: of rollmill that wrote it, if that is known.
    """
    if found not in range(1, FORMAT + 1):
        what = "no format" if found is None else f"format {found}"
        by = f", written by rollmill {version}" if version else ""
        raise CheckpointError(
            f"{path} has {what}{by}; this is rollmill {rollmill.__version__}, which reads formats up to {FORMAT}. Use "
            f"the version of rollmill that wrote it, or move {path.parent} out of the run."
        )


def require_whole(folder: Path) -> None:
    """Verify the files of a checkpoint's model. Raises DamagedCheckpointError; CheckpointError like `find_damage`."""
    with verifying(folder, model_files):
        pass


def find_damage(folder: Path, which: Named | None = None, *, content: bool = True) -> list[str]:
    """Compare a checkpoint's files with its manifest; returns a sentence for each damaged one.

    Args:
        which: the files to compare; default all.
        content: compare hashes, too, which reads every byte.

    Raises:
        CheckpointError: the checkpoint is of a later format, or cannot be read.
    """
    try:
        with verifying(folder, which, content=content):
            return []
    except DamagedCheckpointError as error:
        return error.damage


@contextmanager
def verifying(folder: Path, which: Named | None = None, *, content: bool = True) -> Iterator[None]:
    """Verify a checkpoint's files, in threads while the body loads them. Folders without a manifest are not verified.

    Args: see `find_damage`.

    Raises:
        DamagedCheckpointError: a file is missing or was changed; also in place of the body's error, which may come
            from it.
        CheckpointError: the checkpoint is of a later format, or cannot be read.
    """
    manifest = read_manifest(folder)
    files = {} if manifest is None else {n: each for n, each in manifest.files.items() if which is None or which(n)}
    damage = {name: problem for name, each in files.items() if (problem := _size_problem(folder / name, each))}
    stop = threading.Event()
    with ThreadPoolExecutor(THREADS) as pool:
        rest = {} if not content else {name: each for name, each in files.items() if name not in damage}
        largest_first = sorted(rest, key=lambda name: -rest[name].bytes)
        found = {name: pool.submit(_content_problem, folder / name, rest[name], stop) for name in largest_first}

        def require_whole(cause: Exception | None) -> None:
            problems = damage | {name: problem for name, each in found.items() if (problem := each.result())}
            if manifest is not None and (problems or cause) and not folder.is_dir():
                why = "a run that goes on keeps its newest ones and the best; choose one, or raise checkpoint.keep_last"
                raise CheckpointError(f"{folder} was removed while it was read: {why}") from cause
            if problems:
                text = [f"{name} {problem}" for name, problem in sorted(problems.items())]
                raise DamagedCheckpointError(folder, text) from cause

        try:
            if not damage:  # else the body's work would be wasted
                try:
                    yield
                except Exception as error:
                    require_whole(error)
                    raise
            require_whole(None)
        finally:
            stop.set()  # Ctrl-C need not wait for large files


def _size_problem(path: Path, record: FileRecord) -> str:
    with _explained(path):
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return "is missing"
        return "" if size == record.bytes else f"has {size:,} bytes instead of {record.bytes:,}"


def _content_problem(path: Path, record: FileRecord, stop: threading.Event) -> str:
    with _explained(path):
        try:
            return "" if _hash(path, stop) in (record.sha256, "") else "has other content than was written"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return "cannot be read from its disk (input/output error)"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; fix its permissions or its disk") from error


def _flushed_record(path: Path) -> FileRecord:
    record = FileRecord(path.stat().st_size, _hash(path, threading.Event()))
    sync(path)
    return record


def _hash(path: Path, stop: threading.Event) -> str:
    """Return the SHA-256 of a file; "" once `stop` is set."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            if stop.is_set():
                return ""
            digest.update(chunk[:count])  # lets other threads run
    return digest.hexdigest()


def _digest(content: dict[str, Any]) -> str:
    """Return the hash of a manifest without its key `sha256`; the same in every format."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_format(folder: Path) -> bool:
    """True if the state says that there was a manifest."""
    with suppress(OSError, CorruptFileError):
        return bool(read_json_object(folder / STATE).get("format"))
    return False
