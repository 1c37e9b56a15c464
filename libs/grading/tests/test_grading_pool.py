"""Grader processes: they are replaced when they die, and gone when their owner is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rollmill_grading.errors import FunctionRaisedError, GradingError, RemoteFunctionError
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.symbolic import ALGEBRA
from rollmill_grading.worker_process import WorkerFunction

EASY = {"gold": "2\\sqrt{3}", "answer": "\\sqrt{12}"}
ENDLESS = {"gold": "\\sqrt{2}", "answer": "9^{9^{9^{9}}}"}


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    pool = GraderPool()
    yield pool
    pool.close()


def wait_until(happened: Callable[[], bool], limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.01)


def busy(pid: int) -> bool:
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.1)
    return sum(process.cpu_times()[:2]) > before


@pytest.mark.slow
def test_a_worker_killed_from_outside_is_replaced_and_the_answer_judged(pool: GraderPool) -> None:
    assert pool.submit(ALGEBRA, EASY, 10).result(30).value == 1.0
    [first] = pool.pids()
    os.kill(first, signal.SIGSTOP)
    judging = pool.submit(ALGEBRA, EASY, 30)
    os.kill(first, signal.SIGKILL)
    assert judging.result(30).value == 1.0
    assert pool.pids() != [first]
    assert not psutil.pid_exists(first)


@pytest.mark.slow
def test_an_answer_on_which_workers_keep_dying_is_an_error(pool: GraderPool) -> None:
    pool.submit(ALGEBRA, EASY, 10).result(30)
    judging = pool.submit(ALGEBRA, ENDLESS, 60)
    [first] = pool.pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(pool.pids()) and pool.pids() != [first])
    [second] = pool.pids()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(GradingError, match=r"the math grader died twice on this answer \(exit status -9"):
        judging.result(30)
    assert pool.submit(ALGEBRA, EASY, 10).result(30).value == 1.0


@pytest.mark.slow
def test_the_limit_is_hard_and_counts_from_the_start_of_the_work(pool: GraderPool) -> None:
    """The easy answer waits for as long as its own limit."""
    replies = [pool.submit(ALGEBRA, payload, limit) for payload, limit in ((ENDLESS, 1.0), (ENDLESS, 1.0), (EASY, 2.0))]
    assert [reply.result(60).outcome for reply in replies] == ["timeout", "timeout", "ok"]


@pytest.mark.slow
def test_closing_leaves_no_process_and_ends_what_is_under_way() -> None:
    before = set(threading.enumerate())  # pools of other tests may live as long as their module
    pool = GraderPool(workers=2)
    pool.submit(ALGEBRA, EASY, 10).result(30)
    first = set(pool.pids())
    endless = [pool.submit(ALGEBRA, ENDLESS, 60) for _ in range(3)]
    wait_until(lambda: len(pool.pids()) == 2 and all(busy(pid) for pid in pool.pids()))
    pids = first | set(pool.pids())
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert all(reply.done() for reply in endless)
    with pytest.raises(GradingError, match="closed"):
        endless[0].result()
    assert endless[2].cancelled()
    with pytest.raises(GradingError, match="closed"):
        pool.submit(ALGEBRA, EASY, 1)
    assert not [each for each in set(threading.enumerate()) - before if each.name == "rollmill-grader"]


@pytest.mark.slow
def test_workers_die_with_their_parent() -> None:
    program = """
        from rollmill_grading.grader_pool import GraderPool
        from rollmill_grading.symbolic import ALGEBRA
        pool = GraderPool()
        pool.submit(ALGEBRA, {"gold": "x", "answer": "x"}, 10).result(30)
        pool.submit(ALGEBRA, {"gold": "x", "answer": "9^{9^{9^{9}}}"}, 100)
        print(pool.pids()[0], flush=True)
        import time; time.sleep(100)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert psutil.pid_exists(worker)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


def test_the_worker_loads_no_torch(pool: GraderPool) -> None:
    pool.submit(ALGEBRA, EASY, 10).result(30)
    [pid] = pool.pids()
    assert not [found.path for found in psutil.Process(pid).memory_maps() if "torch" in found.path]


def load_failing(setup: str) -> Callable[[str], float]:
    """Load a function in a process: raises for the setup `at start`, and for every payload."""
    if setup == "at start":
        raise ImportError("no such library")

    def grade(payload: str) -> float:
        if payload == "traced":
            raise FunctionRaisedError("ValueError: wrong (mine.py:3)", "Traceback of mine.py")
        raise ValueError(payload)

    return grade


FAILING = WorkerFunction("failing", "test_grading_pool:load_failing")


def test_a_grader_that_fails_says_why(pool: GraderPool) -> None:
    with pytest.raises(GradingError, match=r"^the failing grader cannot start: ImportError: no such library$"):
        pool.submit(FAILING, "text", 10, setup="at start").result(60)
    with pytest.raises(GradingError, match=r"^the failing grader raised ValueError: text$"):
        pool.submit(FAILING, "text", 10).result(60)
    with pytest.raises(GradingError, match=r"^ValueError: wrong \(mine\.py:3\)$") as raised:
        pool.submit(FAILING, "traced", 10).result(60)
    assert isinstance(raised.value.__cause__, RemoteFunctionError)
    assert "Traceback of mine.py" in str(raised.value.__cause__)


def test_a_limit_of_a_year_is_a_limit(pool: GraderPool) -> None:
    assert pool.submit(ALGEBRA, EASY, 366 * 86400.0).result(30).value == 1.0


def test_closing_while_others_take_jobs_ends() -> None:
    for _ in range(20):
        pool = GraderPool(workers=4)
        for _ in range(8):
            pool.submit(ALGEBRA, EASY, 10)
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.slow
def test_a_worker_that_does_not_read_its_answer_is_replaced(pool: GraderPool) -> None:
    """An answer larger than a pipe, to a process that is stopped."""
    assert pool.submit(ALGEBRA, EASY, 10).result(30).value == 1.0
    [first] = pool.pids()
    os.kill(first, signal.SIGSTOP)
    large = {"gold": "1", "answer": "9" * 1_000_000}
    assert pool.submit(ALGEBRA, large, 0.5).result(30).outcome == "timeout"
    assert pool.submit(ALGEBRA, EASY, 10).result(30).value == 1.0
    assert not psutil.pid_exists(first)
