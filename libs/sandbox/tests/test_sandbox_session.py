"""Sessions: state, values, limits of each execution, `host`, and what untrusted code can do to its channel."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import becomes_childless, children, count_open_files

from rollmill_sandbox import Sandbox, SandboxError, SandboxLimits, SessionExecution
from rollmill_sandbox.session import HostCallback

BACKENDS = ("namespaces", "landlock")
SMALL = SandboxLimits(wall_s=5.0, cpu_s=1, memory_mb=256, output_bytes=1 << 16)


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(backend=request.param) as made:
        yield made


def executed(
    sandbox: Sandbox, *programs: str, host: HostCallback | None = None, limits: SandboxLimits = SMALL
) -> list[SessionExecution]:
    """Answers of one session to programs."""

    async def all_of_them() -> list[SessionExecution]:
        async with sandbox.session(limits=limits) as session:
            return [await session.execute(program, host=host) for program in programs]

    return asyncio.run(all_of_them())


async def echo(text: str) -> str:
    return text + text


def test_names_files_and_imports_live_on(sandbox: Sandbox) -> None:
    found = executed(
        sandbox,
        "import math\nx = 1\ndef f(n):\n    return n + x",
        "x = 10\nopen('kept', 'w').write('k')",
        "f(5), math.floor(2.5), open('kept').read(), __name__",
    )
    assert [execution.outcome for execution in found] == ["ok"] * 3
    assert [execution.value for execution in found] == [None, "1", "(15, 2, 'k', '__main__')"]
    assert all(execution.safe for execution in found)


def test_without_isolation_every_execution_says_so() -> None:
    with Sandbox(backend="plain") as sandbox:
        found = executed(sandbox, "x = 1\nx", "import os; os._exit(0)", "x")
    assert [(execution.outcome, execution.value) for execution in found] == [
        ("ok", "1"),
        ("killed", None),
        ("ended", None),
    ]
    assert not any(execution.safe for execution in found)


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("1 + 1", "2"),
        ("'a'", "'a'"),
        ("None", None),
        ("x = 5", None),
        ("", None),
        ("# nothing", None),
        ("if True:\n    5", None),
        ("1; 2", "2"),
        ("print(3)", None),
        ("[1, {'a': (2.5, None)}]", "[1, {'a': (2.5, None)}]"),
        ("'\\ud800'", "'\\ud800'"),
        ("class A:\n    def __repr__(self): return '\\ud800ü'\nA()", "���ü"),
    ],
)
def test_a_value_is_that_of_the_last_expression(sandbox: Sandbox, program: str, value: str | None) -> None:
    (found,) = executed(sandbox, program)
    assert (found.outcome, found.value) == ("ok", value)


def test_output_belongs_to_its_execution(sandbox: Sandbox) -> None:
    programs = ["import sys; print('a'); print('b', file=sys.stderr)", "", "import os; os.write(1, b'\\xff')"]
    found = executed(sandbox, *programs)
    assert [(execution.stdout, execution.stderr) for execution in found] == [("a\n", "b\n"), ("", ""), ("\ufffd", "")]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def f():\n    return 1 / 0\nf()", 'in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError'),
        ("(", "SyntaxError: '(' was never closed"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class A:\n    def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
        ("\ud800", "UnicodeEncodeError"),
        ("host('x')", "RuntimeError: host() has nobody to answer it in this execution"),
        ("host('x' * (1 << 17))", "ValueError: a message to host() of 131072 bytes; 65536 are allowed"),
        ("import threading as t, sys\nt.excepthook = lambda a: sys.exit(print(a.exc_value))\n"
         "x = t.Thread(target=host, args='y'); x.start(); x.join(); 1 / 0", "division by zero"),
    ],
)  # fmt: skip
def test_an_exception_is_an_error_and_the_session_goes_on(sandbox: Sandbox, program: str, said: str) -> None:
    error, following = executed(sandbox, program, "1")
    assert (error.outcome, error.value) == ("error", None)
    assert said in error.stderr
    assert "rollmill" not in error.stderr.replace("rollmill-sandbox-", "")
    assert (following.outcome, following.value) == ("ok", "1")


def forged(*parts: str) -> str:
    """Statements that write a frame of their own to the session's channel."""
    return (
        f"import os, struct\nparts = [part.encode() for part in {parts!r}]\n"
        "body = b''.join(struct.pack('!I', len(part)) + part for part in parts)\n"
        "os.write(3, struct.pack('!I', len(body)) + body)\n"
    )


def test_what_a_program_said_before_it_died_is_its_answer(sandbox: Sandbox) -> None:
    """However soon it does."""
    for _ in range(20):
        found = executed(sandbox, "0", forged("done", "2", "ok", "", "") + "os._exit(0)", "1")
        assert [each.outcome for each in found] == ["ok", "ok", "killed"]


FATAL = {
    "a loop": ("while True: pass", "timeout"),
    "sleep": ("import time; time.sleep(99)", "timeout"),
    "a deaf loop": (
        "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    "memory": ("x = [1] * 10**11", "memory"),
    "output": ("print('x' * 100_000)", "output"),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "a long value": ("'x' * 100_000", "output"),
    "an exit": ("import os; os._exit(0)", "killed"),
    "a fault": ("import ctypes; ctypes.string_at(0)", "killed"),
    "a closed channel": ("import os; os.close(3)", "killed"),
    "no frame": ("import os; os.write(3, bytes([0, 0, 0, 4, 0, 0, 255, 0]))", "killed"),
    "an empty frame": ("import os; os.write(3, bytes(4))", "killed"),
    "a flood of nothing": ("import os\nwhile True: os.write(3, bytes(4000))", "killed"),
    "a huge frame": ("import os; os.write(3, bytes([255] * 4))", "output"),
    "an unknown word": ("import os; os.write(3, bytes([0, 0, 0, 5, 0, 0, 0, 1, 65]))", "killed"),
    "half a frame": ("import os, time; os.write(3, bytes([0, 0])); time.sleep(99)", "timeout"),
    "the answer to another": (forged("done", "99", "ok", "", ""), "killed"),
    "an unknown outcome": (forged("done", "1", "fine", "", ""), "killed"),
    "a pickle": (
        "import os, pickle, struct\nbody = pickle.dumps(os.system)\nos.write(3, struct.pack('!I', len(body)) + body)",
        "killed",
    ),
}


@pytest.mark.parametrize("name", FATAL)
def test_a_session_ends_with(sandbox: Sandbox, name: str) -> None:
    program, outcome = FATAL[name]
    limits = SandboxLimits(wall_s=0.3 if outcome == "timeout" else 10.0, cpu_s=1, memory_mb=256, output_bytes=1 << 16)
    found, following = executed(sandbox, program, "1", limits=limits)
    assert (found.outcome, found.value) == (outcome, None), found
    assert len(found.stdout) + len(found.stderr) <= 1 << 16
    assert following == SessionExecution("ended", None, "", "", 0.0)


def test_an_answer_given_too_early_does_not_answer_the_next(sandbox: Sandbox) -> None:
    """The program answers for itself, and goes on; its true answer then comes when another one is waited for."""
    early = forged("done", "1", "ok", "1", "early") + "import time; time.sleep(.05)\n7"
    first, second, third = executed(sandbox, early, "8", "9")
    assert (first.outcome, first.value) == ("ok", "early")
    assert (second.outcome, third.outcome) == ("killed", "ended")


def test_questions_asked_without_waiting_for_answers_end_the_session(sandbox: Sandbox) -> None:
    """So that answers do not pile up."""
    asked = 0

    async def host(text: str) -> str:
        nonlocal asked
        asked += 1
        return "x" * 100_000

    again = "while True: os.write(3, struct.pack('!I', len(body)) + body)"
    found, _ = executed(sandbox, forged("host", "") + again, "1", host=host)
    assert found.outcome == "killed"
    assert asked < 50


def test_a_signal_that_comes_late_is_the_programs_own_fault(sandbox: Sandbox) -> None:
    program = (
        "import os, signal, threading, time\n"
        "def late():\n    time.sleep(.5)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=late).start()"
    )
    first, second, _ = executed(sandbox, program, "import time; time.sleep(2)", "1")
    assert first.outcome == "ok"
    assert second.outcome in ("error", "killed")


WAKERS = {
    "nothing": "",
    "a timer": (
        "import ctypes\nlibc, timer = ctypes.CDLL(None), ctypes.c_void_p()\n"
        "event = (ctypes.c_int * 16)(0, 0, 18)  # SIGCONT\n"
        "libc.timer_create(1, event, ctypes.byref(timer))\n"
        "libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 10**6, 0, 10**8), None)\n"
    ),
    "its own output": (
        "import fcntl, os, signal\n"
        "try:\n    fcntl.fcntl(1, 10, signal.SIGCONT)\n    fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid())\n"
        "    fcntl.fcntl(1, fcntl.F_SETFL, os.O_WRONLY | os.O_ASYNC)\nexcept OSError: pass\n"
        "print('read this')\n"
    ),
}


@pytest.mark.parametrize("waker", WAKERS)
def test_nothing_runs_between_executions(sandbox: Sandbox, waker: str) -> None:
    program = WAKERS[waker] + (
        "import threading, time\nn = 0\n"
        "def count():\n    global n\n    while True:\n        n += 1\n        time.sleep(.001)\n"
        "threading.Thread(target=count, daemon=True).start()"
    )

    async def both() -> list[int]:
        async with sandbox.session() as session:
            await session.execute(program)
            before = int((await session.execute("n")).value or 0)
            await asyncio.sleep(1.0)
            return [before, int((await session.execute("n")).value or 0)]

    before, after = asyncio.run(both())
    assert after - before < 150  # several hundred, if it went on


def test_the_host_answers(sandbox: Sandbox) -> None:
    asked = []

    async def host(text: str) -> str:
        asked.append(text)
        await asyncio.sleep(0.3)
        return text[::-1]

    found, following = executed(
        sandbox, "x = [host('abc'), host('ü\\n')]\nx", "x", host=host, limits=SandboxLimits(wall_s=0.5, memory_mb=256)
    )
    assert asked == ["abc", "ü\n"]
    assert (found.outcome, found.value, following.value) == ("ok", "['cba', '\\nü']", "['cba', '\\nü']"), found
    assert found.seconds < 0.5


def test_a_long_message_and_answer_arrive_whole(sandbox: Sandbox) -> None:
    (found,) = executed(sandbox, "len(host('ab' * 25_000)), host('\\ud800') == chr(0xfffd) * 6", host=echo)
    assert found.value == "(100000, True)", found


def test_what_the_host_raises_is_raised_and_ends_the_session(sandbox: Sandbox) -> None:
    class StopError(OSError):
        pass

    async def host(text: str) -> str:
        raise StopError(text)

    async def wrong(text: str) -> str:
        return 5  # type: ignore[return-value]

    async def raising(answerer: HostCallback, error: type[Exception]) -> SessionExecution:
        async with sandbox.session() as session:
            with pytest.raises(error):
                await session.execute("host('why')", host=answerer)
            assert session.ended
            return await session.execute("1")

    assert asyncio.run(raising(host, StopError)).outcome == "ended"
    assert asyncio.run(raising(wrong, TypeError)).outcome == "ended"


def test_one_session_calls_a_function_in_another() -> None:
    """With one turn for all: neither waits for the other."""

    async def both(sandbox: Sandbox) -> SessionExecution:
        async with sandbox.session() as candidate, sandbox.session() as checker:
            await candidate.execute("def double(n): return 2 * n")

            async def ask(text: str) -> str:
                return (await candidate.execute(f"double({int(text)})")).value or ""

            return await checker.execute("all(host(str(n)) == str(2 * n) for n in range(20))", host=ask)

    with Sandbox(jobs=1, sessions=1) as sandbox:
        found = asyncio.run(asyncio.wait_for(both(sandbox), 60))
    assert (found.outcome, found.value) == ("ok", "True"), found


def test_a_session_does_one_thing_at_a_time(sandbox: Sandbox) -> None:
    async def from_within() -> SessionExecution:
        async with sandbox.session() as session:

            async def host(text: str) -> str:
                with pytest.raises(SandboxError, match="a session executes one program at a time"):
                    await session.execute("1")
                return "on"

            return await session.execute("host('')", host=host)

    assert asyncio.run(from_within()).value == "'on'"


def test_idle_sessions_take_no_turn_from_runs() -> None:
    async def all_at_once(sandbox: Sandbox) -> str:
        async with sandbox.session() as first, sandbox.session() as second:
            await first.execute("1")
            await second.execute("1")
            return (await sandbox.run("print('ran')")).stdout

    with Sandbox(jobs=1, sessions=2) as sandbox:
        assert asyncio.run(asyncio.wait_for(all_at_once(sandbox), 60)) == "ran\n"


def test_sessions_wait_for_their_turn() -> None:
    opened: list[int] = []

    async def one(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            opened.append(1)
            assert sum(opened) <= 2
            await session.execute("import time; time.sleep(.02)")
            opened.append(-1)

    async def many(sandbox: Sandbox) -> None:
        await asyncio.gather(*(one(sandbox) for _ in range(12)))

    with Sandbox(sessions=2) as sandbox:
        asyncio.run(many(sandbox))
    assert opened.count(1) == 12


def test_an_idle_session_ends_by_itself(sandbox: Sandbox) -> None:
    async def wait() -> str:
        async with sandbox.session(idle_s=0.2) as session:
            await session.execute("1")
            while children(sandbox.pid()):
                await asyncio.sleep(0.05)
            return (await session.execute("1")).outcome

    assert asyncio.run(wait()) == "ended"


def test_a_session_ends_where_another_process_has_its_socket() -> None:
    """As one does that was forked while the session was open."""

    async def close(sandbox: Sandbox) -> subprocess.Popen[bytes]:
        async with sandbox.session() as session:
            await session.execute("1")
            return subprocess.Popen(["sleep", "99"], pass_fds=[session._caller.fileno()])

    with Sandbox() as sandbox:
        other = asyncio.run(close(sandbox))
        try:
            assert becomes_childless(sandbox.pid())
        finally:
            other.kill()
            other.wait()


def test_a_cancelled_execution_ends_its_session(sandbox: Sandbox) -> None:
    async def cancel() -> str:
        async with sandbox.session() as session:
            task = asyncio.create_task(session.execute("import time; time.sleep(99)"))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return (await session.execute("1")).outcome

    assert asyncio.run(cancel()) == "ended"
    assert becomes_childless(sandbox.pid())


def test_sessions_are_apart(sandbox: Sandbox) -> None:
    async def both() -> list[str]:
        async with sandbox.session(files={"a.txt": b"1"}) as one, sandbox.session() as two:
            await one.execute("import json; json.mark = 1")
            seen = [
                await session.execute("import os, json; os.listdir('.'), hasattr(json, 'mark')")
                for session in (one, two)
            ]
            return [str(execution.value) for execution in seen]

    assert asyncio.run(both()) == ["(['a.txt'], True)", "([], False)"]


def test_nothing_is_left_of_sessions(sandbox: Sandbox) -> None:
    (where,) = executed(sandbox, "import os; os.getcwd()")
    around = Path(ast.literal_eval(where.value or "")).parent
    assert becomes_childless(sandbox.pid())
    before = _count_files(sandbox, around)
    endings = ("an exit", "a fault", "a closed channel", "no frame")
    for number in range(40):
        executed(sandbox, "open('left-by-a-session', 'w').write('y')", FATAL[endings[number % 4]][0], "1")
    assert becomes_childless(sandbox.pid())
    assert _count_files(sandbox, around) == before
    assert not Path("/tmp/left-by-a-session").exists()


def test_a_closed_sandbox_ends_its_sessions() -> None:
    async def close() -> str:
        sandbox = Sandbox()
        async with sandbox.session() as session:
            await session.execute("1")
            sandbox.close()
            first = await session.execute("1")
            assert first.outcome in ("killed", "ended")  # the kernel may take a moment
            return (await session.execute("1")).outcome

    assert asyncio.run(close()) == "ended"


@pytest.mark.parametrize(
    ("files", "limits", "said"),
    [
        ({"../x": b""}, SMALL, "is not a path inside"),
        (
            {},
            SandboxLimits(processes=2),
            "could not start a program: limits.processes is 2; the landlock backend runs one",
        ),
    ],
)
def test_a_landlock_session_that_cannot_start_says_why(
    files: dict[str, bytes], limits: SandboxLimits, said: str
) -> None:
    async def start() -> None:
        with Sandbox(backend="landlock") as sandbox:
            async with sandbox.session(files, limits):
                pass

    with pytest.raises(SandboxError, match=said):
        asyncio.run(start())


def test_wrong_times_are_refused(sandbox: Sandbox) -> None:
    async def start(idle_s: float, wall_s: float) -> None:
        async with sandbox.session(idle_s=idle_s) as session:
            await session.execute("1", wall_s=wall_s)

    with pytest.raises(ValueError, match="idle_s is 0; it has to be above 0"):
        asyncio.run(start(0, 1))
    with pytest.raises(ValueError, match="wall_s is -1; it has to be above 0"):
        asyncio.run(start(1, -1))


def _count_files(sandbox: Sandbox, around: Path) -> tuple[object, ...]:
    return count_open_files(os.getpid()), count_open_files(sandbox.pid()), sorted(os.listdir(around))
