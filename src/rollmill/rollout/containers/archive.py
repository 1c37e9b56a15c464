"""Files and folders as archives, which is how an engine takes them."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from rollmill.errors import ConfigError

_IN_MEMORY = 32 << 20


def pack(files: Mapping[str, Path]) -> IO[bytes]:
    """An archive of files and folders, by their path in it; all belong to root.

    Raises ConfigError naming one that is not there.
    """
    packed = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - the caller reads it
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, source in files.items():
            if not source.exists():
                raise ConfigError(f"environment.files: there is no {source}; correct the path")
            archive.add(source, arcname=path.strip("/") or ".", filter=_as_root)
    packed.seek(0)
    return packed


def pack_bytes(name: str, content: bytes, mode: int = 0o644) -> bytes:
    """An archive of one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), mode
        archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack_file(packed: bytes) -> bytes | None:
    """Content of the only file in an archive; None if it is no regular file, such as a link."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        entry = archive.next()
        found = archive.extractfile(entry) if entry is not None and entry.isreg() else None
        return None if found is None else found.read()


def folder_digest(path: Path) -> str:
    """Hash of a file, or of a folder's files with their names and modes."""
    digest = hashlib.sha256()
    for each in _walk(path):
        kind = "link" if each.is_symlink() else "folder" if each.is_dir() else "file"
        digest.update(f"{each.relative_to(path)}\0{kind}\0{each.lstat().st_mode & 0o111}\0".encode())
        if kind == "link":
            digest.update(os.readlink(each).encode())
        elif kind == "file":
            digest.update(hashlib.sha256(each.read_bytes()).digest())
    return digest.hexdigest()


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for each in sorted(path.iterdir()):
            yield from _walk(each)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None
