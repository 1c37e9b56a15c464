"""Hostile programs, each of which has to fail, and what must be left after them: nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from processes import becomes_childless, count_open_files, descendants

from rollmill_sandbox import ProgramResult, Sandbox
from rollmill_sandbox import attacks as hostile_module
from rollmill_sandbox.attacks import ATTACKS, FORKS, TRY, Attack
from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.backend_selection import SAFE_BACKENDS
from rollmill_sandbox.isolation_check import run_attacks
from rollmill_sandbox.syscalls import DENIED

CASES = [(backend, hostile) for backend in SAFE_BACKENDS for hostile in ATTACKS if hostile.is_for(backend)]
AT_LEAST = 60


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(backend="namespaces") as made:
        yield made


@cache
def attacked(backend: BackendName) -> dict[str, ProgramResult]:
    """The result of every hostile program, by name; several run at once."""
    with Sandbox(backend=backend, jobs=8) as sandbox:
        found = {hostile.name: result for hostile, result in asyncio.run(run_attacks(sandbox))}
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        assert becomes_childless(sandbox.pid())
        return found


@pytest.mark.parametrize(("backend", "hostile"), CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_a_hostile_program_fails(backend: BackendName, hostile: Attack) -> None:
    found = attacked(backend)[hostile.name]
    assert hostile.is_contained(found, backend), found
    assert len(found.stdout) + len(found.stderr) <= hostile.limits.output_bytes


def test_there_are_enough_of_them() -> None:
    assert min(Counter(backend for backend, _ in CASES).values()) >= AT_LEAST
    assert len({hostile.name for hostile in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_architecture_has_the_calls_of_the_programs(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert hostile_module.__file__ is not None
    spec = importlib.util.spec_from_file_location("hostile_elsewhere", hostile_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert [hostile.name for hostile in module.ATTACKS] == [hostile.name for hostile in ATTACKS]
    assert not any("syscall(-1" in hostile.program for hostile in module.ATTACKS)
    assert any(f"syscall({DENIED['bpf'][machine == 'aarch64']}," in hostile.program for hostile in module.ATTACKS)


def test_the_attempts_are_not_refused_by_mistake() -> None:
    """Outside, the harness of the attempts says BREACH, and what only the landlock backend refuses is possible."""
    with Sandbox(backend="plain") as sandbox:
        assert sandbox.run_sync(TRY % "    open('/etc/passwd')").stdout == "BREACH\n"
        for hostile in ATTACKS:
            if hostile.only == "landlock" and hostile.name != "run a program":
                assert sandbox.run_sync(hostile.program).stdout == "BREACH\n", hostile.name


def test_a_program_sees_nothing_of_its_parents(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with Sandbox(backend="namespaces") as fresh:
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
    assert becomes_childless(sandbox.pid())


LEFT = "left-by-a-program"
LEAVERS = (
    "print(1)",
    f"import os; os.makedirs('{LEFT}/b/c'); open('{LEFT}/b/c/d', 'w').write('z')",
    "1 / 0",
    "import os; os.kill(os.getpid(), 9)",
    "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "import os\ntry: os.fork()\nexcept OSError: pass",
)


@pytest.mark.parametrize("runs", [24, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.thorough])])
@pytest.mark.parametrize("backend", SAFE_BACKENDS)
def test_nothing_is_left_after_many_runs(backend: BackendName, runs: int) -> None:
    """Counts processes, descriptors, mounts and temporary files, before and after."""
    with Sandbox(backend=backend) as sandbox:
        around = Path(sandbox.run_sync("import os; print(os.getcwd())").stdout.strip()).parent
        assert becomes_childless(sandbox.pid())
        before = _counted(sandbox, around)
        for number in range(runs):
            sandbox.run_sync(LEAVERS[number % len(LEAVERS)])
        assert becomes_childless(sandbox.pid())
        assert _counted(sandbox, around) == before
    assert not Path("/tmp", LEFT).exists()
    assert backend == "namespaces" or not around.exists()


def _mounts(process: int | str) -> list[str]:
    """Mounts that a process sees, without those of containers, which come and go meanwhile."""
    lines = Path(f"/proc/{process}/mounts").read_text().splitlines()
    return [line for line in lines if not any(each in line for each in ("/containers/", "/docker/", " nsfs "))]


def _counted(sandbox: Sandbox, around: Path) -> tuple[object, ...]:
    files = count_open_files(os.getpid()), count_open_files(sandbox.pid())
    mounts = [_mounts("self"), _mounts(sandbox.pid())]
    return *files, *mounts, len(descendants(os.getpid())), sorted(os.listdir(around))
