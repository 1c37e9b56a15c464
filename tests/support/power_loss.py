"""A disk that loses what was not flushed when the power fails, modelled from the file operations of a run.

`python power_loss.py RUN_FILE OUT LOG` runs a run file and notes every file operation below OUT: an audit hook stops
before each of Python's own operations, and what has changed since the last one (libraries written in Rust, too) is
found by comparing the folder. `disk_states` says what the disk may hold after each of them:

- a file's content is that of its last fsync; what was written or appended since is there, lost, or half there;
- a folder's names are those of its last fsync; each later change of names is there or not, in any order.
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = 0
_LEFT_OUT = ("processes",)  # heartbeats, which are never flushed
Tree = dict[str, bytes]
"""Content of every file, by its path. A folder's path ends with a slash."""


@dataclass(frozen=True)
class Operation:
    """A change of a file's content or of a folder's names, or an fsync of either."""

    kind: Literal["write", "names", "sync"]
    node: int  #: the file or folder, under whatever name
    path: str  #: its name at that moment
    content: bytes = b""
    names: tuple[tuple[str, int | None], ...] = ()  #: changed at once: a rename has two


class Recorder:
    """Compares a folder with what was there before."""

    def __init__(self, root: Path) -> None:
        self.operations: list[Operation] = []
        self._root, self._lock, self._busy = root, threading.RLock(), threading.local()
        self._nodes: dict[int, int] = {}  # by inode, while a name for it is there
        self._paths: dict[int, str] = {ROOT: ""}
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._content: dict[int, tuple[tuple[int, int], bytes]] = {}
        self._last = ROOT

    def install(self) -> None:
        """Observe all operations of this process from now on."""
        flush = os.fsync

        def fsync(descriptor: int) -> None:
            self.observe()
            with self._lock:
                node = self._nodes.get(os.fstat(descriptor).st_ino)
                if os.fstat(descriptor).st_ino == os.stat(self._root).st_ino:
                    node = ROOT
                if node is not None:
                    self.operations.append(Operation("sync", node, self._paths[node]))
            flush(descriptor)

        os.fsync = fsync  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            written = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not written or not str(arguments[0]).startswith(str(self._root)):
                return
        elif event not in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            return
        self.observe()

    def observe(self) -> None:
        """Note what has changed since the last call."""
        if getattr(self._busy, "now", False) or not self._root.is_dir():
            return
        self._busy.now = True
        try:
            with self._lock:
                self._compare()
        finally:
            self._busy.now = False

    def _compare(self) -> None:
        names: dict[int, dict[str, int]] = {}
        inodes: dict[int, int] = {}
        files: dict[int, Path] = {}

        def visit(folder: Path, node: int) -> None:
            names[node] = {}
            for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                inner = self._nodes.get(entry.inode())
                if inner is None:
                    self._last += 1
                    inner = self._last
                inodes[entry.inode()] = names[node][entry.name] = inner
                self._paths[inner] = str(Path(entry.path).relative_to(self._root))
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _LEFT_OUT:
                        visit(Path(entry.path), inner)
                else:
                    files[inner] = Path(entry.path)

        visit(self._root, ROOT)
        self._nodes = inodes
        for node, now in names.items():
            if node not in self._names:
                self._add(node, ())
            self._note_names(node, self._names.get(node, {}), now)
        self._names = names
        for node, path in files.items():
            self._note_content(node, path)

    def _note_names(self, node: int, before: dict[str, int], now: dict[str, int]) -> None:
        changed = {name: now.get(name) for name in (*before, *now) if before.get(name) != now.get(name)}
        new_name = {inner: name for name, inner in changed.items() if inner is not None}
        for name, inner in list(changed.items()):
            if inner is None and (renamed := new_name.get(before[name])) is not None:
                del changed[name]
                changed.pop(renamed, None)
                self._add(node, ((name, None), (renamed, before[name])))
        for name, inner in changed.items():
            self._add(node, ((name, inner),))

    def _add(self, node: int, names: tuple[tuple[str, int | None], ...]) -> None:
        self.operations.append(Operation("names", node, self._paths[node], names=names))

    def _note_content(self, node: int, path: Path) -> None:
        try:
            status = path.stat()
            mark = (status.st_mtime_ns, status.st_size)
            known, before = self._content.get(node, (None, None))
            settled = time.time_ns() - status.st_mtime_ns > 10**9  # else it may have changed within a tick of the clock
            if stat.S_ISREG(status.st_mode) and not (known == mark and settled):
                content = path.read_bytes()
                self._content[node] = (mark, content)
                if content != before:
                    self.operations.append(Operation("write", node, self._paths[node], content=content))
        except FileNotFoundError:  # removed by another thread
            return


@dataclass
class Disk:
    """Contents and names as the process sees them, and as they were at the last fsync."""

    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    synced_contents: dict[int, bytes] = field(default_factory=dict)
    synced_names: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: dict[int, list[tuple[tuple[str, int | None], ...]]] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        """Do an operation."""
        node = operation.node
        match operation.kind:
            case "write":
                self.contents[node] = operation.content
            case "names":
                _rename(self.names.setdefault(node, {}), operation.names)
                if operation.names:
                    self.pending.setdefault(node, []).append(operation.names)
            case "sync":
                if node in self.contents:
                    self.synced_contents[node] = self.contents[node]
                self.synced_names[node] = dict(self.names.get(node, {}))
                self.pending[node] = []

    def seen(self) -> Tree:
        """The files as the process sees them."""
        return self._tree(lambda node: self.contents.get(node, b""), lambda node: self.names.get(node, {}))

    def after_power_failure(self) -> Iterator[Tree]:
        """States that the disk may be in if the power fails now: all or none of what was not flushed, names without
        contents, and each change of names alone or missing."""
        lost = lambda node: self.synced_contents.get(node, b"")  # noqa: E731
        there = lambda node: self.contents.get(node, b"")  # noqa: E731

        def half(node: int) -> bytes:
            before, now = lost(node), there(node)
            kept = len(before) if now.startswith(before) else 0  # what was appended to is not written again
            return now[: kept + (len(now) - kept) // 2]

        changes = [(node, number) for node, some in self.pending.items() for number in range(len(some))]
        for content in (lost, half, there):
            yield self._tree(content, lambda node: self._names(node, lambda _: True))
            yield self._tree(content, lambda node: self._names(node, lambda _: False))
        for one in changes:
            yield self._tree(lost, lambda node, one=one: self._names(node, lambda each: each == one))  # type: ignore[misc]
            yield self._tree(lost, lambda node, one=one: self._names(node, lambda each: each != one))  # type: ignore[misc]
            yield self._tree(there, lambda node, one=one: self._names(node, lambda each: each != one))  # type: ignore[misc]

    def _names(self, node: int, is_there: Callable[[tuple[int, int]], bool]) -> dict[str, int]:
        names = dict(self.synced_names.get(node, {}))
        for number, change in enumerate(self.pending.get(node, [])):
            if is_there((node, number)):
                _rename(names, change)
        return names

    def _tree(
        self, content: Callable[[int], bytes], names: Callable[[int], dict[str, int]], node: int = ROOT, at: str = ""
    ) -> Tree:
        found: Tree = {}
        for name, inner in names(node).items():
            path = f"{at}{name}"
            if inner in self.names:
                found |= {f"{path}/": b""} | self._tree(content, names, inner, f"{path}/")
            else:
                found[path] = content(inner)
        return found


def _rename(names: dict[str, int], changes: tuple[tuple[str, int | None], ...]) -> None:
    for name, inner in changes:
        if inner is None:
            names.pop(name, None)
        else:
            names[name] = inner


def disk_states(operations: Sequence[Operation]) -> Iterator[tuple[int, Tree, list[Tree]]]:
    """Number of operations done, the files as the process sees them, and the different states of the disk after a power
    failure at that moment."""
    disk = Disk()
    for number, operation in enumerate(operations, start=1):
        disk.apply(operation)
        different: dict[frozenset[tuple[str, int]], Tree] = {}
        for tree in disk.after_power_failure():
            different[frozenset((path, hash(content)) for path, content in tree.items())] = tree
        yield number, disk.seen(), list(different.values())


def main(run_file: Path, out: Path, log: Path) -> None:
    """Run a run file and write its operations."""
    import rollmill

    recorder = Recorder(out.absolute())
    out.mkdir()  # the folder itself is durable, as the run's lock sees to it
    recorder.install()
    rollmill.run(run_file, out=out.absolute())
    recorder.observe()
    log.write_bytes(pickle.dumps(recorder.operations))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support import power_loss  # so that operations are of a module that tests can import

    power_loss.main(*map(Path, sys.argv[1:]))
