"""Sockets of the machine, memory of the kernel, and how many programs may take it at once."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import lacks

from rollmill_sandbox import Sandbox, SandboxLimits
from rollmill_sandbox import kernel_memory as module
from rollmill_sandbox.backend_selection import SAFE_BACKENDS
from rollmill_sandbox.file_locks import LOCKS
from rollmill_sandbox.kernel_memory import count_slots, kernel_memory_mb, machine_memory_mb
from rollmill_sandbox.limits import OPEN_FILES
from rollmill_sandbox.semaphore import FairSemaphore

LIMITS = SandboxLimits(memory_mb=128, disk_mb=8)


@pytest.fixture(scope="module", params=SAFE_BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, backend=request.param) as made:
        yield made


SENDER = """
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    for family in (socket.AF_UNIX, socket.AF_INET):
        for send in ("sendto", "sendmsg", "connect"):
            try:
                left, right = socket.socketpair(family, kind)
                if send == "sendto":
                    left.sendto(b"reached", PATH)
                elif send == "sendmsg":
                    left.sendmsg([b"reached"], [], 0, PATH)
                else:
                    left.connect(PATH)
                    left.send(b"reached")
            except (OSError, ValueError) as error:
                print(type(error).__name__)
"""


def test_a_program_reaches_no_socket_of_the_machine(sandbox: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = f"{folder}/listener"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(path)
            Path(path).chmod(0o777)
            listener.setblocking(False)
            found = sandbox.run_sync(f"PATH = {path!r}\n" + SENDER)
            assert found.outcome == "ok", found
            assert len(found.stdout.splitlines()) == 18
            with pytest.raises(BlockingIOError):
                listener.recv(99)


FILLER = """
import socket
sockets = []
try:
    while True:
        sockets += socket.socketpair()
except OSError:
    pass
written = 0
for each in sockets:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
        try:
            each.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        except PermissionError:
            pass
    each.setblocking(False)
    try:
        while True:
            written += each.send(bytes(1 << 20))
    except BlockingIOError:
        pass
print(len(sockets), written)
"""


def test_sockets_take_no_more_memory_of_the_kernel_than_is_counted(sandbox: Sandbox) -> None:
    found = sandbox.run_sync(FILLER)
    count, written = map(int, found.stdout.split())
    assert OPEN_FILES - 16 <= count <= OPEN_FILES
    assert 0 < written <= (kernel_memory_mb(LIMITS) - LIMITS.disk_mb) << 20
    assert written <= 32 << 20


LOCKER = """
import fcntl, struct
file = open("locked", "w+b")
for place in range(20_000, 0, -2):
    fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, place, 1, 0))
"locked"
"""


def test_locks_of_files_take_no_memory_of_the_kernel(sandbox: Sandbox) -> None:
    async def count() -> tuple[int, int]:
        async with sandbox.session() as session:
            before = _locks()
            assert (await session.execute(LOCKER)).value == "'locked'"
            return before, _locks()

    before, after = asyncio.run(count())
    assert after - before < 1000


def _locks() -> int:
    return len(Path("/proc/locks").read_text().splitlines())


SHARED_DATABASE = """
import multiprocessing, sqlite3, subprocess, sys

def add():
    connection = sqlite3.connect("numbers.db", timeout=8)
    for _ in range(10):
        with connection:
            connection.execute("begin immediate")
            (value,) = connection.execute("select value from numbers").fetchone()
            connection.execute("update numbers set value = ?", (value + 1,))
    connection.close()

connection = sqlite3.connect("numbers.db")
connection.execute(f"pragma journal_mode = {JOURNAL}")
connection.execute("create table numbers as select 0 as value")
connection.commit()
connection.close()
processes = [multiprocessing.get_context("fork").Process(target=add) for _ in range(3)]
for each in processes:
    each.start()
for each in processes:
    each.join()
code = "import sqlite3; print(*sqlite3.connect('numbers.db').execute('select value from numbers').fetchone())"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
"""
MANY = SandboxLimits(memory_mb=256, processes=6)


@pytest.fixture(scope="module")
def several() -> Iterator[Sandbox]:
    if lacks("namespaces"):
        pytest.skip(lacks("namespaces"))
    with Sandbox(MANY, backend="namespaces") as made:
        if made.run_sync("import fcntl\nfcntl.lockf(open('x', 'w'), fcntl.LOCK_EX)").outcome != "ok":
            pytest.skip("this kernel, or a sandbox around, does not let a filter ask")
        yield made


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_processes_of_a_program_share_a_database_in_a_file(several: Sandbox, journal: str) -> None:
    found = several.run_sync(f"JOURNAL = {journal!r}\n" + SHARED_DATABASE)
    assert (found.outcome, found.stdout) == ("ok", "30\n"), found


def test_a_session_of_several_processes_locks_files(several: Sandbox) -> None:
    async def main() -> list[str]:
        async with several.session() as session:
            first = await session.execute("import fcntl\nfile = open('x', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)")
            held = (
                "import os\nif os.fork() == 0:\n"
                "    try: fcntl.lockf(open('x', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
                "    except BlockingIOError: os._exit(5)\n    os._exit(0)\nos.waitstatus_to_exitcode(os.wait()[1])"
            )
            second = await session.execute(held)
            return [first.outcome, second.outcome, str(second.value)]

    assert asyncio.run(main()) == ["ok", "ok", "5"]


MANY_LOCKS = """
import fcntl, os, struct
held = 0
for name in range(8):
    file = os.open(f"locked{name}", os.O_RDWR | os.O_CREAT)
    try:
        for place in range(20_000, 0, -2):
            fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, place, 1, 0))
            held += 1
    except OSError as error:
        print(error.errno)
held
"""


def test_locks_between_processes_take_little_memory_of_the_kernel(several: Sandbox) -> None:
    async def count() -> tuple[int, str, str]:
        async with several.session() as session:
            before = _locks()
            found = await session.execute(MANY_LOCKS)
            return _locks() - before, str(found.value), found.stdout

    more, held, stdout = asyncio.run(count())
    assert int(held) <= LOCKS
    assert more <= LOCKS + 100  # others may lock files meanwhile
    assert stdout == f"{errno.ENOLCK}\n" * 8


def test_a_program_that_locks_a_file_of_the_machine_is_killed(several: Sandbox) -> None:
    found = several.run_sync("import fcntl, os, time\nfile = open(os.__file__)\nfcntl.lockf(file, 1)\ntime.sleep(60)")
    assert (found.outcome, found.stderr) == ("killed", "killed: it locked a file outside of its folder\n")


def test_several_processes_are_counted_as_several() -> None:
    one, many = SandboxLimits(threads=4), SandboxLimits(threads=4, processes=4)
    sockets = 8 * OPEN_FILES * 0.2
    assert kernel_memory_mb(many) > kernel_memory_mb(one) + sockets / 2
    assert kernel_memory_mb(SandboxLimits(disk_mb=500)) - kernel_memory_mb(SandboxLimits(disk_mb=64)) == 436


def test_the_worst_programs_at_once_fit_into_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < machine_memory_mb() < 1 << 30
    worst = kernel_memory_mb(LIMITS)
    for memory in (worst * 40.0, worst * 17.0, worst * 4.0, worst * 0.5):
        monkeypatch.setattr(module, "machine_memory_mb", lambda memory=memory: memory)
        slots = count_slots(LIMITS, 8, 0.25)
        assert 1 <= slots <= 8
        at_once = 8 // slots
        assert at_once == 1 or at_once * worst <= memory / 4
    monkeypatch.setattr(module, "machine_memory_mb", lambda: math.inf)
    assert count_slots(LIMITS, 8, 0.25) == 1


def test_a_turn_of_several_slots_waits_for_all_of_them_in_order() -> None:
    async def main() -> list[str]:
        slots, done = FairSemaphore(3), []

        async def hold(name: str, count: int) -> None:
            async with slots.turn_async(count):
                done.append(name)
                await asyncio.sleep(0)

        async with slots.turn_async(2):
            wide = asyncio.create_task(hold("wide", 3))
            await asyncio.sleep(0)
            narrow = asyncio.create_task(hold("narrow", 1))
            await asyncio.sleep(0.01)
            assert done == []  # a slot is free, but the wide one came first
        await asyncio.gather(wide, narrow)
        async with slots.turn_async(2):
            wide = asyncio.create_task(hold("cancelled", 3))
            await asyncio.sleep(0)
            narrow = asyncio.create_task(hold("behind it", 1))
            await asyncio.sleep(0.01)
            wide.cancel()
            await asyncio.wait_for(narrow, 10)
        with slots.turn(3):
            done.append("all")
        return done

    assert asyncio.run(main()) == ["wide", "narrow", "behind it", "all"]
