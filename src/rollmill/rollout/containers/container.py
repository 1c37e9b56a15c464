"""A rollout's container: commands with a time limit, and files in and out."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from rollmill.errors import EpisodeError
from rollmill.rollout.containers.archive import pack, pack_bytes, unpack_file

if TYPE_CHECKING:
    from rollmill.rollout.containers.engine import ContainerEngine
    from rollmill.rollout.environments.builtin.container import ContainerEnvironment

Result = TypeVar("Result")

MOST_OUTPUT = 1 << 18
"""Bytes of a command's output that are kept by default: the first and the last half of them."""
MOST_READ = 64 << 20
"""Bytes of the largest file that is read from a container."""
_POLL_S = 1.0
_KILL_S = 10.0
_STDOUT = 1

# Of all processes, the kernel kills those first that an agent has started when memory runs out.
_FIRST_TO_GO = ["/bin/sh", "-c", '{ echo 500 > /proc/self/oom_score_adj; } 2>/dev/null; exec "$@"', "sh"]

# Kills all that has started in the last $1 hundredths of a second, whatever it has become since: it may have lost its
# parent, or have a session of its own. Only what the shell itself can do, so that it needs no process more. Repeated,
# since what is being killed may start others; what cannot be read is killed as well.
_KILL_YOUNGER = r"""
{ read -r up rest < /proc/uptime; } 2>/dev/null || exit 1
since=$((${up%.*}${up#*.} - $1))
round=0
while [ $round -lt 50 ]; do
  round=$((round + 1)) found=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    if [ "$pid" = 1 ] || [ "$pid" = $$ ]; then continue; fi
    line=
    { read -r line < "$folder/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    if [ "$1" = Z ] || [ "$1" = X ]; then continue; fi
    case ${20} in
      '' | *[!0-9]*) ;;
      *) if [ "${20}" -lt "$since" ]; then continue; fi ;;
    esac
    kill -9 "$pid" 2>/dev/null
    found=1
  done
  if [ -z "$found" ]; then exit 0; fi
done
exit 1
"""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """End of a command. Output beyond the limit is left out in the middle, which says how much it was."""

    code: int | None  #: exit code; None: it was killed, since it took too long or wrote too much
    output: str  #: what it printed to stdout and stderr, in that order
    stdout: str
    reason: str = ""  #: why it was killed

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass(slots=True)
class _Kept:
    """First and last half of at most `most` bytes."""

    most: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    seen: int = 0

    def add(self, part: bytes) -> None:
        self.seen += len(part)
        room = max(self.most // 2 - len(self.head), 0)
        self.head += part[:room]
        self.tail += part[room:]
        if len(self.tail) > self.most:
            del self.tail[: -self.most // 2]

    def text(self) -> str:
        last = bytes(self.tail[-(self.most // 2) :])
        left = self.seen - len(self.head) - len(last)
        between = f"\n... {left} bytes left out ...\n".encode() if left else b""
        return (bytes(self.head) + between + last).decode("utf-8", "replace")


def run_in(
    engine: ContainerEngine,
    id: str,
    section: ContainerEnvironment,
    command: Sequence[str],
    time_limit_s: float,
    *,
    user: str | None = None,
    folder: str | None = None,
    variables: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    most_output: int = MOST_OUTPUT,
) -> ExecResult:
    """Run a command in a container, and wait for its end; at the time limit kill it and all that it has started."""
    api, begun = engine.api, time.monotonic()
    state = api.inspect_container(id)["State"]
    if not state["Running"] and state["ExitCode"] != 0:  # its first process was killed; 0: its lifetime is over
        api.start(id)
    made = api.exec_create(
        id,
        [*_FIRST_TO_GO, *command],
        stdin=stdin is not None,
        user=user or "",  # default: that of the container
        workdir=folder or section.folder,
        environment={**section.variables, **(variables or {})},
    )
    stream = api.exec_start(made["Id"], socket=True)
    both, stdout, killed = _Kept(most_output), _Kept(most_output), ""
    try:

        def watch() -> str:
            too_much = section.disk_mb is not None and engine.written_bytes(id) > section.disk_mb << 20
            return (
                f"the container has written more than {section.disk_mb} MiB: the command was killed" if too_much else ""
            )

        watched = None if section.disk_mb is None else watch
        try:
            for kind, part in _frames(stream, stdin, begun + time_limit_s, watched):
                both.add(part)
                if kind == _STDOUT:
                    stdout.add(part)
        except TimeoutError as error:
            killed = str(error) or f"it was still running after {time_limit_s:g} s, and was killed"
            _kill_younger(engine, id, made["Id"], time.monotonic() - begun)
    finally:
        _close(stream)
    code = None if killed else _exit_code(api, made["Id"])
    return ExecResult(code, both.text(), stdout.text(), killed)


def _exit_code(api: Any, exec_id: str) -> int:
    """The exit code, which an engine may know a moment after the output has ended."""
    until = time.monotonic() + _KILL_S
    while (found := api.exec_inspect(exec_id))["Running"] and time.monotonic() < until:
        time.sleep(0.02)
    return int(found["ExitCode"] if found["ExitCode"] is not None else -1)


def _frames(
    stream: Any, stdin: bytes | None, until: float, watch: Callable[[], str] | None
) -> Iterator[tuple[int, bytes]]:
    """Parts of a command's output with their stream. Raises TimeoutError at the time limit, or as `watch` says."""
    sock, buffered = getattr(stream, "_sock", stream), stream._response.raw._fp.fp
    if stdin is not None:
        sock.settimeout(max(until - time.monotonic(), 0.01))
        with suppress(OSError):  # it need not read it
            sock.sendall(stdin)
            sock.shutdown(socket.SHUT_WR)
    sock.setblocking(False)
    read = bytearray(buffered.peek(1) if hasattr(buffered, "peek") else b"")  # came with the answer's header
    poll, ended = select.poll(), False
    poll.register(sock, select.POLLIN)
    while True:
        while len(read) >= 8 and len(read) >= 8 + (size := struct.unpack(">L", read[4:8])[0]):
            yield read[0], bytes(read[8 : 8 + size])
            del read[: 8 + size]
        if ended:
            return
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not poll.poll(1000 * (left if watch is None else min(left, _POLL_S))):
            if watch is not None and (said := watch()):
                raise TimeoutError(said)
            continue
        try:
            part = sock.recv(1 << 16)
        except BlockingIOError:
            continue
        except ConnectionResetError:  # what it did not read of its input was on its way
            part = b""
        read += part
        ended = not part


def _kill_younger(engine: ContainerEngine, id: str, exec_id: str, seconds: float) -> None:
    """Kill what has started in the last seconds; where there is no process left to do that with, all by a new start."""
    from docker.errors import APIError

    api, ended = engine.api, False
    with suppress(APIError, TimeoutError):
        script = ["/bin/sh", "-c", _KILL_YOUNGER, "sh", f"{100 * seconds + 20:.0f}"]
        made = api.exec_create(id, script, user="0", workdir="/")
        stream = api.exec_start(made["Id"], socket=True)
        try:
            for _ in _frames(stream, None, time.monotonic() + _KILL_S, None):
                pass
        finally:
            _close(stream)
        ended = _exit_code(api, made["Id"]) == 0
    until = time.monotonic() + 1.0
    while ended and api.exec_inspect(exec_id)["Running"]:
        ended = time.monotonic() < until
        time.sleep(0.02)
    if not ended:
        api.restart(id, timeout=0)


def _close(stream: Any) -> None:
    with suppress(OSError, ValueError):
        stream._response.close()
        stream.close()


class Container:
    """The container of one rollout. Calls are made one after the other, each in a thread."""

    def __init__(
        self, engine: ContainerEngine, id: str, section: ContainerEnvironment, threads: ThreadPoolExecutor
    ) -> None:
        self.id, self.section = id, section
        self._engine, self._threads = engine, threads
        self._turn = asyncio.Lock()

    @property
    def engine_url(self) -> str:
        """URL of the engine's socket, for programs that use it themselves."""
        return self._engine.url

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        time_limit_s: float | None = None,
        user: str | None = None,
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        most_output: int = MOST_OUTPUT,
    ) -> ExecResult:
        """Run a command, or a text with the container's shell, and wait for its end.

        Programs that it leaves in the background go on. At the time limit it is killed, with all that it has started.

        Args:
            time_limit_s: default: environment.time_limit_s.
            user, folder: default: those of the environment.
            variables: in addition to those of the environment.

        Raises EpisodeError if the engine fails, or the container has ended.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        limit = self.section.time_limit_s if time_limit_s is None else time_limit_s
        return await self._call(
            "a command cannot be run",
            lambda: run_in(
                self._engine,
                self.id,
                self.section,
                words,
                limit,
                user=user,
                folder=folder,
                variables=variables,
                stdin=stdin,
                most_output=most_output,
            ),
        )

    async def write(self, path: str, content: bytes, *, user: str | None = None) -> ExecResult:
        """Write a file as the user, and the folders above it; its result says if that failed."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && head -c "$2" > "$1"'
        words = ["/bin/sh", "-c", script, "sh", path, str(len(content))]
        return await self.exec(words, user=user, stdin=content)

    async def read(self, path: str, most: int = MOST_READ) -> bytes | None:
        """Content of a regular file, whoever may read it; None if there is none, or it is larger."""
        from docker.errors import NotFound

        def read() -> bytes | None:
            try:
                parts, _ = self._engine.api.get_archive(self.id, path)
                packed = bytearray()
                for part in parts:
                    packed += part
                    if len(packed) > most + 65536:
                        return None
                return unpack_file(bytes(packed))
            except NotFound:
                return None

        return await self._call(f"{path} cannot be read", read)

    async def upload(self, files: Mapping[str, Path]) -> None:
        """Copy files and folders of this machine into the container, as root, by their path there."""
        packed = pack(files).read()
        await self._call("files cannot be copied", lambda: self._engine.api.put_archive(self.id, "/", packed))

    async def upload_bytes(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file as root, in a folder that exists."""
        at = PurePosixPath(path)
        packed = pack_bytes(at.name, content, mode)
        call = partial(self._engine.api.put_archive, self.id, str(at.parent), packed)
        await self._call(f"{path} cannot be written", call)

    async def end_processes(self) -> None:
        """Kill all that commands have left running. Files stay."""

        restart = partial(self._engine.api.restart, self.id, timeout=0)
        await self._call("its processes cannot be ended", restart)

    async def _call(self, what: str, function: Callable[[], Result]) -> Result:
        def called() -> Result:
            with self._engine.episode_errors(what):
                return function()

        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, called)


__all__ = ["MOST_OUTPUT", "Container", "EpisodeError", "ExecResult", "run_in"]
