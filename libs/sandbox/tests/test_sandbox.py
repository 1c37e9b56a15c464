"""The sandbox with ordinary programs: input, files, outcomes, limits, concurrency, recovery."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import becomes_childless, children, descendants, runs

from rollmill_sandbox import Sandbox, SandboxError, SandboxLimits
from rollmill_sandbox import probe as probing
from rollmill_sandbox.client import ForkServer
from rollmill_sandbox.landlock import landlock_version
from rollmill_sandbox.limits import ProgramResult
from rollmill_sandbox.visible_files import build_filesystem_view

BACKENDS = ("namespaces", "landlock", "plain")


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend=request.param) as made:
        yield made


@pytest.mark.parametrize(
    ("program", "outcome", "exit_code"),
    [
        ("", "ok", 0),
        ("import sys; sys.exit()", "ok", 0),
        ("import sys; sys.exit(3)", "error", 3),
        ("raise SystemExit('why')", "error", 1),
        ("1 / 0", "error", 1),
        ("(", "error", 1),
        ("x = [1] * 10**11", "memory", 1),
        ("print('x' * 2_000_000)", "output", None),
        ("import time; time.sleep(99)", "timeout", -signal.SIGKILL),
        ("while True: pass", "timeout", None),
        ("import os; os.kill(os.getpid(), 11)", "killed", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 15)", "killed", -signal.SIGTERM),
        ("import threading; threading.Thread(target=lambda: print('late')).start()", "ok", 0),
    ],
)
def test_outcomes_are_told_apart(sandbox: Sandbox, program: str, outcome: str, exit_code: int | None) -> None:
    found = sandbox.run_sync(program, limits=SandboxLimits(wall_s=0.3 if outcome == "timeout" else 30.0, cpu_s=1))
    assert found.outcome == outcome, found
    assert exit_code is None or found.exit_code == exit_code
    assert found.safe == (sandbox.backend != "plain")


def test_a_program_reads_stdin_and_files_and_runs_as_main(sandbox: Sandbox) -> None:
    program = (
        "import sys, helper\nfrom pathlib import Path\n"
        "print(__name__, sys.stdin.read(), helper.value, Path('data/x.bin').read_bytes(), sys.argv)"
    )
    files = {"helper.py": b"value = 7", "data/x.bin": b"\xff\x00"}
    found = sandbox.run_sync(program, stdin="zwölf " * 50_000, files=files)
    assert found.stderr == ""
    assert found.stdout == f"__main__ {'zwölf ' * 50_000} 7 b'\\xff\\x00' ['main.py']\n"


WAYS_TO_WRITE = {
    "exit": "print(input())\nexit()",
    "quit": "print(input())\nquit(0)",
    "a file of its own": "out = open(1, 'w')\nout.write(open(0).read())",
    "its method": "import os, sys\nwrite = os.fdopen(1, 'w').write\nwrite(sys.stdin.read())",
    "a wrapper": (
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\n"
        "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint(input())"
    ),
    "a text that is written at the end": (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "@atexit.register\ndef write(): sys.__stdout__.write(sys.stdout.getvalue())\nprint(input())"
    ),
    "names that cannot be looked at": (
        "class Odd:\n    def __getattr__(self, name): raise SystemExit(3)\nodd = Odd()\nout = open(1, 'w')\n"
        "print(input(), file=out)"
    ),
    "no module": "import sys\nprint(input())\ndel sys.modules['__main__']",
}


@pytest.mark.parametrize("name", WAYS_TO_WRITE)
def test_what_programs_write_in_their_ways_arrives(sandbox: Sandbox, name: str) -> None:
    found = sandbox.run_sync(WAYS_TO_WRITE[name], "zwölf\n")
    assert (found.outcome, found.stdout, found.stderr) == ("ok", "zwölf\n", "")


def test_output_that_is_not_utf8_is_replaced(sandbox: Sandbox) -> None:
    found = sandbox.run_sync("import os; os.write(1, b'a\\xffb'); os.write(2, '✓'.encode())")
    assert (found.stdout, found.stderr) == ("a\ufffdb", "✓")


def test_a_traceback_names_the_programs_lines_only(sandbox: Sandbox) -> None:
    found = sandbox.run_sync("def f():\n    return 1 / 0\nf()")
    assert found.stderr.count("File") == 2
    assert 'File "main.py", line 2, in f\n    return 1 / 0' in found.stderr


def test_all_output_before_the_end_arrives(sandbox: Sandbox) -> None:
    found = sandbox.run_sync("import atexit; atexit.register(print, 'bye'); print('x' * 900_000, end='')")
    assert found.stdout == "x" * 900_000 + "bye\n"


def test_measures_have_their_units(sandbox: Sandbox) -> None:
    found = sandbox.run_sync(
        "import time\nx = bytearray(50 << 20)\nwhile time.process_time() < .15: pass\ntime.sleep(.1)",
    )
    assert 0.12 <= found.cpu_seconds < found.seconds
    assert 50 < found.peak_mb < 200


def test_processes_are_allowed_when_asked_for(sandbox: Sandbox) -> None:
    program = (
        "import subprocess, sys, multiprocessing\n"
        "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout)\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    )
    if sandbox.backend == "landlock":
        with pytest.raises(SandboxError, match=r"limits.processes is 8; the landlock backend runs one process. Set it"):
            sandbox.run_sync(program, limits=SandboxLimits(processes=8))
        return
    found = sandbox.run_sync(program, limits=SandboxLimits(processes=8))
    assert found.stdout == "5\n\n[1, 2]\n", found.stderr


def test_asyncio_and_threads_work_inside(sandbox: Sandbox) -> None:
    program = "import asyncio\nprint(asyncio.run(asyncio.to_thread(sum, [1, 2])))"
    assert sandbox.run_sync(program).stdout == "3\n"


def test_many_at_once_wait_for_their_turn() -> None:
    async def all_of_them(sandbox: Sandbox) -> list[ProgramResult]:
        return await asyncio.gather(*(sandbox.run(f"import time; time.sleep(.05); print({n})") for n in range(16)))

    with Sandbox(jobs=4) as sandbox:
        started = time.monotonic()
        found = asyncio.run(all_of_them(sandbox))
        assert time.monotonic() - started >= 16 / 4 * 0.05
    assert [result.stdout for result in found] == [f"{n}\n" for n in range(16)]


def test_threads_share_a_sandbox() -> None:
    with Sandbox(jobs=3) as sandbox, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: sandbox.run_sync(f"print({n})").stdout, range(40)))
    assert found == [f"{n}\n" for n in range(40)]


def test_jobs_share_no_namespace_with_the_machine_nor_but_the_empty_network_with_each_other() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can look at the namespaces of the jobs")
    kinds = ("net", "pid", "ipc", "uts", "mnt", "user", "cgroup")

    def of(pid: int) -> dict[str, str]:
        return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in kinds}

    async def two() -> list[dict[str, str]]:
        with Sandbox(backend="namespaces", jobs=2) as sandbox:
            await sandbox.run("pass")
            sleeping = [asyncio.create_task(sandbox.run("import time; time.sleep(30)")) for _ in range(2)]
            deadline = time.monotonic() + 20
            while len(descendants(sandbox.pid())) < 4:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            found = [of(job) for job in children(sandbox.pid())]
            for each in sleeping:
                each.cancel()
            await asyncio.gather(*sleeping, return_exceptions=True)
        return found

    here, (one, other) = of(os.getpid()), asyncio.run(two())
    assert [kind for kind in kinds if one[kind] == here[kind]] == []
    assert [kind for kind in kinds if one[kind] == other[kind]] == ["net"]


def test_a_cancelled_run_is_killed_and_gives_its_turn_back() -> None:
    async def cancel(sandbox: Sandbox) -> ProgramResult:
        await sandbox.run("")
        tasks = [asyncio.create_task(sandbox.run("import time; time.sleep(99)")) for _ in range(3)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await sandbox.run("print('next')")

    with Sandbox(jobs=1) as sandbox:
        assert asyncio.run(cancel(sandbox)).stdout == "next\n"
        assert becomes_childless(sandbox.pid())


def test_a_server_killed_from_outside_is_replaced() -> None:
    with Sandbox() as sandbox:
        sandbox.run_sync("")
        first = sandbox.pid()
        os.kill(first, signal.SIGKILL)
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        assert sandbox.pid() != first


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_server_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    monkeypatch.setattr("rollmill_sandbox.exchange.GRACE_S", 2.0)
    limits = SandboxLimits(wall_s=0.4)
    with Sandbox() as sandbox:
        sandbox.run_sync("")
        first = sandbox.pid()
        os.kill(first, signal.SIGSTOP)
        if asynchronous:
            found = asyncio.run(sandbox.run("print(1)", limits=limits))
        else:
            found = sandbox.run_sync("print(1)", limits=limits)
        assert found.stdout == "1\n"
        assert sandbox.pid() != first


def test_a_program_whose_server_is_killed_runs_again() -> None:
    async def kill_it(sandbox: Sandbox) -> ProgramResult:
        await sandbox.run("")
        task = asyncio.create_task(sandbox.run("import time; time.sleep(.2); print('done')"))
        await asyncio.sleep(0.1)
        os.kill(sandbox.pid(), signal.SIGKILL)
        return await task

    with Sandbox() as sandbox:
        assert asyncio.run(kill_it(sandbox)).stdout == "done\n"


def test_a_program_killed_from_outside_says_so() -> None:
    async def kill_it(sandbox: Sandbox) -> ProgramResult:
        await sandbox.run("")
        assert becomes_childless(sandbox.pid())
        task = asyncio.create_task(sandbox.run("import time; time.sleep(99)"))
        while not (started := children(sandbox.pid())):
            await asyncio.sleep(0.01)
        os.kill(started[0], signal.SIGKILL)
        return await task

    with Sandbox() as sandbox:
        assert asyncio.run(kill_it(sandbox)).outcome == "killed"
        assert sandbox.run_sync("print(1)").stdout == "1\n"


@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_a_landlock_program_does_not_outlive(victim: str) -> None:
    """Whoever is killed, even when the program asks to be spared."""
    program = "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nopen('x', 'w').close()\ntime.sleep(99)"

    async def kill_it(sandbox: Sandbox, around: Path) -> None:
        task = asyncio.create_task(sandbox.run(program))
        server = sandbox.pid()
        while len(family := descendants(server)) < 2 or not list(around.glob("*/x")):
            await asyncio.sleep(0.01)
        supervisor, running = family
        os.kill(server if victim == "server" else supervisor, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while runs(running):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with Sandbox(backend="landlock") as sandbox:
        around = Path(sandbox.run_sync("import os; print(os.getcwd())").stdout.strip()).parent
        assert becomes_childless(sandbox.pid())
        asyncio.run(kill_it(sandbox, around))
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        assert becomes_childless(sandbox.pid())
    assert not around.exists()


def test_no_process_outlives_its_caller(tmp_path: Path) -> None:
    program = (
        "import os, threading, time\nfrom rollmill_sandbox import Sandbox\n"
        "sandbox = Sandbox(); sandbox.run_sync('')\n"
        "threading.Thread(target=sandbox.run_sync, args=('import time; time.sleep(99)',), daemon=True).start()\n"
        "time.sleep(.2); print(sandbox.pid(), flush=True); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    deadline = time.monotonic() + 10
    while runs(int(ended.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _as_ordinary_user(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-B", str(Path(__file__).with_name("ordinary_user.py")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["quickest", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "uid", "backend"),
    [
        ("user", 65534, "namespaces"),
        ("root", 0, "namespaces"),
        ("landlock", 65534, "landlock"),
        ("none", 0, "landlock"),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_is_as_safe(kind: str, uid: int, backend: str, programs: str) -> None:
    """Also as the root of a user namespace, as in a container without root; and where no namespace can be opened."""
    ended = _as_ordinary_user(kind, programs)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"uid": uid, "backend": backend, "enough": True, "wrong": []}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can forbid namespaces to a process")
def test_what_a_machine_lacks_is_said() -> None:
    ended = _as_ordinary_user("refused")
    assert ended.returncode == 1
    assert "SandboxError: no safe sandbox can be built here.\nnamespaces: the sandbox's server cannot" in ended.stderr
    assert "[Errno 28] unshare" in ended.stderr
    assert "user.max_user_namespaces above 0" in ended.stderr
    assert 'backend="plain" runs programs without any isolation' in ended.stderr


def test_only_packages_that_are_named_can_be_imported() -> None:
    program = "import pluggy; print(pluggy.HookspecMarker('me').project_name)"
    with Sandbox() as sandbox:
        assert "No module named 'pluggy'" in sandbox.run_sync(program).stderr
    with Sandbox(packages=["pluggy"]) as sandbox:
        found = sandbox.run_sync(program)
        assert found.stdout == "me\n", found.stderr
        assert "No module named 'pytest'" in sandbox.run_sync("import pytest").stderr


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "x\0y"])
def test_a_path_out_of_the_folder_is_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(SandboxError, match="is not a path inside"):
        sandbox.run_sync("", files={name: b""})


def test_what_cannot_be_is_an_error_that_says_so() -> None:
    with pytest.raises(SandboxError, match="package 'no_such_package' cannot be allowed"):
        Sandbox(packages=["no_such_package"])
    with pytest.raises(ValueError, match="wall_s is 0"):
        SandboxLimits(wall_s=0)
    with Sandbox() as sandbox, pytest.raises(SandboxError, match="disk limit of 1 MiB"):
        sandbox.run_sync("", files={"x": bytes(2 << 20)}, limits=SandboxLimits(disk_mb=1))
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run_sync("")


def test_a_machine_that_contains_nothing_is_refused(sandbox: Sandbox) -> None:
    """The probe finds that the plain backend lets programs through, and lets the other one pass."""
    found = sandbox.run_sync(probing.PROGRAM, limits=probing.LIMITS)
    if found.safe:
        probing.check_probe(found)
    else:
        with pytest.raises(SandboxError, match="open a socket, fork"):
            probing.check_probe(found)


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill_sandbox.client.find_interpreter", lambda: "/bin/false")
    with Sandbox() as sandbox, pytest.raises(SandboxError, match=r"cannot start: .*needs Linux 5.12"):
        sandbox.run_sync("")


def test_a_server_says_what_the_kernel_refuses() -> None:
    view = build_filesystem_view([])
    view.binds["/no/such/path"] = "/no/such/path"
    with pytest.raises(SandboxError, match="No such file"):
        ForkServer("namespaces", view)


@pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")
def test_landlock_alone_lets_a_process_write_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    program = (
        "import sys, os\nfrom rollmill_sandbox import kernel, landlock\n"
        "kernel.drop_privileges()\nlandlock.restrict_files(landlock.landlock_version(), 'mine')\n"
        "open('mine/x', 'w').close()\nprint(len(os.listdir('/')) > 0)\n"
        "try: open('x', 'w')\nexcept PermissionError: print('refused')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.stdout == "True\nrefused\n", ended.stderr
