"""File helpers: atomic writes (nobody sees half a file), locks, and strict, size-limited reads of text and JSON."""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollmill.errors import ConfigError, CorruptFileError, RollmillError


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError from writing `path` into a RollmillError with advice."""
    try:
        yield
    except OSError as error:
        raise RollmillError(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another folder with --out."
        ) from error


def atomic_write(path: Path, data: bytes, *, private: bool = False, durable: bool = False) -> None:
    """Write `data` to `path` atomically; creates the folder if missing. Raises RollmillError if that fails.

    Args:
        private: only this user may read the file.
        durable: also if the power fails: the old content, or the new one once this returns. For files that a resumed
            run needs; it costs some milliseconds.
    """
    temporary = temporary_path(path)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch(0o600 if private else 0o666)
            temporary.write_bytes(data)
            if durable:
                sync(temporary)
            os.replace(temporary, path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk. A file is not found after a power failure before both
    were flushed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_folder(folder: Path) -> None:
    """Create a folder and missing parents, and flush their names to the disk. Raises OSError."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def require_free_folder(out: Path) -> Path:
    """Return `out` with links resolved. Raises ConfigError if it is a file or a folder that is not empty."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another folder with --out")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another folder with --out")
    return out.resolve()


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the new folder `out`, flushed to the disk, unless the body raises.

    Raises ConfigError like `require_free_folder`, and OSError.
    """
    out = require_free_folder(out)
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}.writing-*"):  # of killed processes
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        share_files(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        temporary.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def share_files(folder: Path) -> None:
    """Give files below `folder` that nobody else may read the mode that the umask gives to new files there.

    safetensors (0.8) writes through a private temporary file, whose mode its files keep.
    """
    new = temporary_path(folder / "new")
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.stat().st_mode & 0o077:
            with suppress(PermissionError):  # on file systems that have no modes
                path.chmod(mode)


_TEMPORARY = re.compile(r"\..+\.(\d+)(?:@(.*))?\.tmp")
_LEFT_S = 3600.0
"""Age from which a temporary file is a leftover of a process that cannot be looked up, or whose number is reused."""


def cache_folder(name: str) -> Path:
    """A folder for what may be lost: `name` in ROLLMILL_CACHE, or in rollmill's part of the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rollmill")
    return Path(os.environ.get("ROLLMILL_CACHE", cache)) / name


def temporary_path(path: Path) -> Path:
    """The path beside `path` under which this thread writes it before it is renamed."""
    return path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}@{socket.gethostname()}.tmp")


def sweep_temporary(folder: Path) -> list[Path]:
    """Remove what dead processes left at temporary paths in a folder and the folders in it; returns what was removed.

    Processes on other hosts cannot be looked up: what they wrote is removed an hour later.
    """
    found = [path for inside in (".*.tmp", "*/.*.tmp") for path in folder.glob(inside) if _is_left(path)]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def _is_left(path: Path) -> bool:
    if (match := _TEMPORARY.fullmatch(path.name)) is None:
        return False
    if match[2] == socket.gethostname() and not is_running(int(match[1])):
        return True
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _LEFT_S
    return False


_PF_EXITING = 0x4
"""Flag of a process that runs no code any more, in the ninth field of its `stat` (Linux, sched.h)."""


def is_running(pid: int) -> bool:
    """True if a process is there that can still write; not if it is ending, or has ended and nobody asked how."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state in "ZX" or int(fields[5]) & _PF_EXITING:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# Locks. The system frees those of a process that ends. Waits for them have a deadline, and errors name the holder.


def try_lock(path: Path) -> IO[str] | None:
    """Return the file, locked until it is closed or the process ends; None if another process has locked it.

    The file then says which process on which host holds the lock, for `lock_holder`.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BlockingIOError:
        file.close()
        return None
    return file


def lock_holder(*paths: Path) -> str:
    """Describe who holds a lock of any kind on one of the files: `process 12 on host (python train.py; it is stopped)`.

    On this host the system knows, on others the file itself says it, if it was locked by `try_lock`.
    """
    files = [(path, path.stat().st_ino) for path in paths if path.is_file()]
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
    except OSError:
        rows = []
    found = {int(row[4]) for row in rows if int(row[5].rpartition(":")[2]) in {inode for _, inode in files}}
    here = [describe_process(pid) for pid in sorted(found - {os.getpid()}) if pid > 0]
    for path, _ in [] if here else files:
        with suppress(OSError, UnicodeDecodeError), path.open() as file:
            if match := re.match(r"process \d+ on [^\n]{1,255}", file.read(300)):
                return match[0]
    return " and ".join(here) or "another process"


def describe_process(pid: int) -> str:
    """Describe a process of this host: its id, its command, and whether it is stopped."""
    about = []
    with suppress(OSError):
        command = " ".join(
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        )
        about = [command[:80]] if command else []
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            about.append(f"it is stopped: `kill -CONT {pid}` continues it")
    return f"process {pid} on {socket.gethostname()}" + (f" ({'; '.join(about)})" if about else "")


def is_locked(path: Path) -> bool:
    """True if some process holds the lock."""
    with suppress(FileNotFoundError, NotADirectoryError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def to_jsonable(value: Any, *, non_finite: str | None = None) -> Any:
    """Convert `value` to JSON types: numpy becomes Python, tuples and sets become lists, keys become text.

    NaN and infinities become None, or their name (`nan`, `inf`, `-inf`) with `non_finite="name"`. Any other type
    becomes its `repr`.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return repr(value) if non_finite else None
    if isinstance(value, dict):
        return {str(key): to_jsonable(item, non_finite=non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item, non_finite=non_finite) for item in value]
    return repr(value)


# Strict, size-limited reading of users' files

MAX_YAML_BYTES = 2**20
"""Largest YAML file; a resolved run file has about 20 kB."""
MAX_TEXT_BYTES = 2**30
"""Largest file that is read whole."""
MAX_JSONL_LINE_BYTES = 2**26
"""Longest line of a JSONL file."""
MAX_JSON_DEPTH = 64
"""Maximum nesting of JSON brackets."""

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Read the text of a UTF-8 file, without a byte order mark.

    Devices and pipes are refused, because they may never end.
    Raises ConfigError if the file is missing, longer than `limit` bytes, not UTF-8, or cannot be read.
    """
    if what := describe_non_file(path):
        raise ConfigError(f"{path}: {what}")
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise ConfigError(f"{path}: is longer than {format_size(limit)}, so it is not read; give a shorter file")
    try:
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"{path}:{line}: cannot be read as UTF-8 text (byte {error.start + 1})"
        raise ConfigError(f"{text}; {encoding_advice(content)}") from error


def describe_non_file(path: Path) -> str | None:
    """Reason why a path is no regular file, such as `no such file` or `is a folder`; None if it is one."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long, a closed folder; a null byte
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "cannot be read: is a folder; give a file"
    if not stat.S_ISREG(mode):
        return "cannot be read: is a device or a pipe, which may have no end; write its content to a file first"
    return None


def encoding_advice(content: bytes) -> str:
    """Advice for a file that is not UTF-8."""
    if content.startswith(_UTF16):
        return "it looks like UTF-16; save it as UTF-8"
    return "it looks like a binary file" if b"\0" in content[:1000] else "save it as UTF-8"


def format_size(count: int) -> str:
    """Bytes in words: `64 MiB`."""
    return f"{count >> 30} GiB" if count >= 2**30 else f"{count >> 20} MiB"


def parse_strict_json(text: str, *, unique_keys: bool = False) -> Any:
    """Parse a JSON text that has no NaN, no infinities and no numbers beyond floats.

    Raises ValueError for anything else, for brackets nested deeper than `MAX_JSON_DEPTH`, and, with `unique_keys`, for
    an object with a duplicate key (JSON does not define which one counts).
    """
    pairs = _no_key_twice if unique_keys else None
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("brackets too deep inside each other") from None
    if is_too_deep(value):
        raise ValueError("brackets too deep inside each other")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file that rollmill wrote.

    Raises CorruptFileError if the file holds anything else, and OSError if it cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged: no JSON ({error}); put the file back") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} is damaged: {type(value).__name__}, not an object; put the file back")
    return value


def describe_json_error(error: ValueError) -> str:
    """Describe an error of `parse_strict_json` in a sentence."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    if "integer string conversion" in str(error):
        return "not readable JSON: a number of thousands of digits; write it as text"
    return f"not readable JSON: {error}"


def is_too_deep(value: Any) -> bool:
    """True if lists and mappings are nested deeper than `MAX_JSON_DEPTH`."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [part for each in level if isinstance(each, dict | list) for part in _parts(each)]
        if not level:
            return False
    return True


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"the key {twice!r:.80} is given twice; keep one")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON; write null, or text")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text:.80} is too large a number; write it as text")
    return value
