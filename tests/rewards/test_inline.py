"""Plain Python functions run in the run's own process while they are quick, and in a grader process otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.reward_helpers import completion, judged, task

from rollmill.errors import RewardError
from rollmill.rewards import RewardManager, RewardResult, function_calls
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rewards.manager import build_reward_manager

FUNCTIONS = '''
import asyncio, os, re, time


def pid(task, completion):
    return os.getpid()


def pids(task, completions):
    return [os.getpid()] * len(completions)


pids.group = True


def changes(task, completion):
    task.metadata["seen"] = task.metadata.get("seen", 0) + 1
    completion.text = "changed"
    return {"pid": os.getpid(), "seen": task.metadata["seen"]}


def as_told(task, completion):
    """Does what the completion says once, then is quick."""
    exec(completion.text, {"os": os, "re": re, "time": time, "task": task, "asyncio": asyncio})
    return os.getpid()


def busy(task, completion):
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return os.getpid()


async def _answer():
    return float(os.getpid())


def runs_a_loop(task, completion):
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(loop.run_in_executor(None, os.getpid))
    finally:
        loop.close()


def gives_an_awaitable(task, completion):
    return _answer()


def imports(task, completion):
    import imported_slowly

    return {"pid": os.getpid(), "imported": imported_slowly.PID}
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(function_calls, "LONGEST_S", 30.0)  # a busy machine may hold up any call
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def build(functions: Path, name: str, **keys: Any) -> RewardManager:
    section = {"name": "python", "function": f"{functions}:{name}", "processes": 1, **keys}
    return build_reward_manager([PythonReward.model_validate(section)])


def run(judge: RewardManager, text: str = "") -> RewardResult:
    return judged(judge, "5", text)


@pytest.fixture
def cut_off_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(function_calls, "LONGEST_S", 0.05)


def test_quick_calls_stay_in_this_process(functions: Path) -> None:
    with build(functions, "pid") as judge:
        assert {run(judge).reward for _ in range(100)} == {os.getpid()}
    with build(functions, "pid", run_in="process") as judge:
        assert run(judge).reward != os.getpid()
    with build(functions, "pids") as judge:
        results = asyncio.run(judge.score_group(task("5"), [completion("5", i) for i in range(3)]))
        assert [each.reward for each in results] == [os.getpid()] * 3


def test_what_a_function_prints_is_no_output_of_the_run(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with build(functions, "as_told") as judge:
        assert run(judge, "print('seen')").reward == os.getpid()
    out, err = capfd.readouterr()
    assert out == ""
    assert "seen" in err


def test_a_function_that_changes_its_arguments_changes_copies(functions: Path) -> None:
    mine, written = task("5"), completion("5")
    with build(functions, "changes") as judge:
        for _ in range(2):
            result = asyncio.run(judge.score(mine, written))
            assert result.parts == {"changes/pid": os.getpid(), "changes/seen": 1}
    assert mine.metadata == {}
    assert written.text == "5"


def test_arguments_that_cannot_be_copied_are_an_error(functions: Path) -> None:
    with build(functions, "pid") as judge, pytest.raises(RewardError, match=r"cannot be sent .* set run_in: thread"):
        judged(judge, threading.Lock(), "5")


HANGS = {
    "sleep": "time.sleep(600)",
    "loop": "while True: pass",
    "loop that catches": "while True:\n    try: time.sleep(600)\n    except Exception: pass",
    "regular expression": "re.match('(a+)+$', 'a' * 60 + 'b')",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_call_that_hangs_meets_its_time_limit(functions: Path, cut_off_soon: Callable[[], None], hang: str) -> None:
    """Also one that never lets other threads run, such as a regular expression. It costs later calls nothing."""
    with build(functions, "as_told", time_limit_s=0.5, timeout_reward=-1) as judge:
        assert run(judge).reward == os.getpid()
        cut_off_soon()
        result = run(judge, HANGS[hang])
        assert (result.reward, result.outcomes) == (-1, {"as_told": "timeout"})
        after = run(judge)
        assert after.reward != os.getpid()
        assert after.outcomes == {"as_told": "ok"}


@pytest.mark.parametrize("slow", ["time.sleep(0.2)", "try: time.sleep(0.2)\nexcept: pass"])
def test_after_a_slow_call_all_calls_run_in_processes(
    functions: Path, cut_off_soon: Callable[[], None], slow: str
) -> None:
    with build(functions, "as_told") as judge:
        assert run(judge).reward == os.getpid()
        cut_off_soon()
        assert run(judge, slow).outcomes == {"as_told": "ok"}
        assert run(judge).reward != os.getpid()


@pytest.mark.parametrize(
    "sets",
    [
        "import signal; signal.alarm(0)",
        "import signal; signal.alarm(7)",
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    ],
)
def test_after_a_call_that_sets_alarms_all_calls_run_in_processes(functions: Path, sets: str) -> None:
    """It could take for ever the next time, and nothing would cut it off."""
    handler = signal.getsignal(signal.SIGALRM)
    with build(functions, "as_told") as judge:
        assert run(judge, sets).reward == os.getpid()
        assert signal.getsignal(signal.SIGALRM) is handler
        assert run(judge).reward not in (None, os.getpid())


def test_calls_that_are_slow_on_average_move_to_a_process(functions: Path) -> None:
    with build(functions, "busy") as judge:
        for _ in range(14):  # 14 of 5 ms are more than 50 + 14 ms
            run(judge)
        assert run(judge).reward != os.getpid()


@pytest.mark.parametrize("name", ["runs_a_loop", "gives_an_awaitable"])
def test_what_works_only_in_a_process_runs_there(functions: Path, name: str) -> None:
    with build(functions, name) as judge:
        assert run(judge).reward not in (None, os.getpid())


@pytest.mark.parametrize("error", ["1 / 0", "raise SystemExit(3)", "raise asyncio.CancelledError"])
def test_errors_are_those_of_a_process(functions: Path, error: str) -> None:
    found = []
    for where in ("auto", "process"):
        with build(functions, "as_told", run_in=where) as judge, pytest.raises(RewardError) as caught:
            run(judge, error)
        found.append(str(caught.value))
    assert found[0] == found[1]


def test_an_import_is_not_cut_off(
    functions: Path, cut_off_soon: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is half imported cannot always be imported again."""
    cut_off_soon()
    text = "import os, time\ntime.sleep(0.2)\nPID = os.getpid()\n"
    (functions.parent / "imported_slowly.py").write_text(text)
    monkeypatch.syspath_prepend(functions.parent)
    with build(functions, "imports") as judge:
        assert run(judge).parts == {"imports/pid": os.getpid(), "imports/imported": os.getpid()}
        parts = run(judge).parts
        assert parts["imports/pid"] == parts["imports/imported"] != os.getpid()


def test_calls_from_other_threads_run_in_a_process(functions: Path) -> None:
    found: list[float | None] = []
    with build(functions, "pid") as judge:
        thread = threading.Thread(target=lambda: found.append(run(judge).reward))
        thread.start()
        thread.join()
        assert len(found) == 1
        assert found != [os.getpid()]
        assert run(judge).reward == os.getpid()


def test_a_timer_of_the_program_goes_on(functions: Path) -> None:
    rang: list[float] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(time.monotonic()))
    timer, began = signal.setitimer(signal.ITIMER_REAL, 0.3), time.monotonic()
    try:
        with build(functions, "as_told") as judge:
            run(judge)
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.3
            run(judge, "time.sleep(0.2)")
            while not rang and time.monotonic() - began < 30:
                time.sleep(0.01)
        assert len(rang) == 1
        assert rang[0] - began >= 0.29
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
