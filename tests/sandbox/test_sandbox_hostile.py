"""Hostile programs, each of which has to fail, and what must be left after them: nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile import FORKS, HOSTILE, TRY, Hostile

from rollmill.sandbox import Sandbox

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the programs hold x86_64 call numbers")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_program_fails(sandbox: Sandbox, hostile: Hostile) -> None:
    found = sandbox.run_sync(hostile.program, limits=hostile.limits)
    assert hostile.contained(found), found
    assert len(found.stdout) + len(found.stderr) <= hostile.limits.output_bytes
    assert sandbox.run_sync("print(1)").stdout == "1\n"


def test_the_attempts_are_not_refused_by_mistake() -> None:
    """Outside, the harness of the attempts says BREACH."""
    with Sandbox(backend="plain") as sandbox:
        assert sandbox.run_sync(TRY % "    open('/etc/passwd')").stdout == "BREACH\n"


def test_a_program_sees_nothing_of_its_parents(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with Sandbox() as fresh:
        found = fresh.run_sync(
            "import os, socket; print(os.environ, os.getppid(), socket.gethostname(), os.listdir('/'))"
        )
    assert "hunter2" not in found.stdout
    assert " 1 sandbox " in found.stdout
    assert "root'" not in found.stdout or str(Path(os.__file__)).startswith("/root/")


def test_only_its_own_folder_survives_until_its_end(sandbox: Sandbox) -> None:
    assert sandbox.run_sync("open('/tmp/left', 'w').write('x'); import os; os.mkdir('/dev/shm/more')").outcome == "ok"
    found = sandbox.run_sync("import os; print(os.listdir('/tmp'))")
    assert found.stdout == "[]\n"
    assert not Path("/tmp/left").exists()


def test_a_program_does_not_change_the_next(sandbox: Sandbox) -> None:
    program = (
        "import json, builtins; print(hasattr(json, 'mark'), hasattr(builtins, 'mark')); json.mark = builtins.mark = 1"
    )
    assert [sandbox.run_sync(program).stdout for _ in range(2)] == ["False False\n"] * 2


def test_a_daemon_ends_with_its_program(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(1e6)\n"
        "    os._exit(0)\n"
        "os.wait(); print('left')"
    )
    found = sandbox.run_sync(program, limits=FORKS)
    assert (found.outcome, found.stdout) == ("ok", "left\n")
    assert found.seconds < FORKS.wall_s
    assert _alone(sandbox)


def test_nothing_is_left_after_many_runs(sandbox: Sandbox) -> None:
    sandbox.run_sync("")
    assert _alone(sandbox)
    me, tmp = psutil.Process(), sorted(os.listdir("/tmp"))
    descriptors = me.num_fds()
    server_descriptors = psutil.Process(sandbox.pid()).num_fds()
    mounts = Path("/proc/self/mounts").read_text()
    programs = ("print(1)", "open('x', 'w').write('y')", "1 / 0")
    for number in range(300):
        sandbox.run_sync(programs[number % 3])
    assert me.num_fds() == descriptors
    assert Path("/proc/self/mounts").read_text() == mounts
    assert sorted(os.listdir("/tmp")) == tmp
    assert _alone(sandbox)
    assert psutil.Process(sandbox.pid()).num_fds() == server_descriptors


def _alone(sandbox: Sandbox) -> bool:
    """Whether the server comes to have no process below it."""
    deadline = time.monotonic() + 10
    while psutil.Process(sandbox.pid()).children(recursive=True):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
