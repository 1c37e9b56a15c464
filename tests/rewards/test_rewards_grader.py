"""Grader processes: they are replaced when they die, and gone when their owner is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from reward_helpers import completion
from waiting import wait_until

from rollmill.config.rewards.base import PythonReward
from rollmill.errors import RewardError
from rollmill.rewards import build_reward_manager, resources
from rollmill.rewards.grader_pool import GraderPool
from rollmill.types import Task

EASY = {"gold": "2\\sqrt{3}", "answer": "\\sqrt{12}"}
ENDLESS = {"gold": "\\sqrt{2}", "answer": "9^{9^{9^{9}}}"}


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    pool = GraderPool()
    yield pool
    pool.close()


def busy(pid: int) -> bool:
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.1)
    return sum(process.cpu_times()[:2]) > before


@pytest.mark.slow
def test_a_worker_killed_from_outside_is_replaced_and_the_answer_judged(pool: GraderPool) -> None:
    assert pool.submit("math", EASY, 10).result(30).value == 1.0
    [first] = pool.pids()
    os.kill(first, signal.SIGSTOP)
    judging = pool.submit("math", EASY, 30)
    os.kill(first, signal.SIGKILL)
    assert judging.result(30).value == 1.0
    assert pool.pids() != [first]
    assert not psutil.pid_exists(first)


@pytest.mark.slow
def test_an_answer_on_which_workers_keep_dying_is_an_error(pool: GraderPool) -> None:
    pool.submit("math", EASY, 10).result(30)
    judging = pool.submit("math", ENDLESS, 60)
    [first] = pool.pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(pool.pids()) and pool.pids() != [first])
    [second] = pool.pids()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RewardError, match=r"the math grader died twice on this answer \(exit status -9"):
        judging.result(30)
    assert pool.submit("math", EASY, 10).result(30).value == 1.0


@pytest.mark.slow
def test_the_limit_is_hard_and_counts_from_the_start_of_the_work(pool: GraderPool) -> None:
    """The easy answer waits for as long as its own limit."""
    replies = [pool.submit("math", payload, limit) for payload, limit in ((ENDLESS, 1.0), (ENDLESS, 1.0), (EASY, 2.0))]
    assert [reply.result(60).outcome for reply in replies] == ["timeout", "timeout", "ok"]


@pytest.mark.slow
def test_closing_leaves_no_process_and_ends_what_is_under_way() -> None:
    before = set(threading.enumerate())  # pools of other tests may live as long as their module
    pool = GraderPool(workers=2)
    pool.submit("math", EASY, 10).result(30)
    first = set(pool.pids())
    endless = [pool.submit("math", ENDLESS, 60) for _ in range(3)]
    wait_until(lambda: len(pool.pids()) == 2 and all(busy(pid) for pid in pool.pids()))
    pids = first | set(pool.pids())
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert all(reply.done() for reply in endless)
    with pytest.raises(RewardError, match="closed"):
        endless[0].result()
    assert endless[2].cancelled()
    with pytest.raises(RewardError, match="closed"):
        pool.submit("math", EASY, 1)
    assert not [each for each in set(threading.enumerate()) - before if each.name == "rollmill-grader"]


@pytest.mark.slow
def test_workers_die_with_their_parent() -> None:
    program = """
        from rollmill.rewards.grader_pool import GraderPool
        pool = GraderPool()
        pool.submit("math", {"gold": "x", "answer": "x"}, 10).result(30)
        pool.submit("math", {"gold": "x", "answer": "9^{9^{9^{9}}}"}, 100)
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
    pool.submit("math", EASY, 10).result(30)
    [pid] = pool.pids()
    assert not [found.path for found in psutil.Process(pid).memory_maps() if "torch" in found.path]


@pytest.mark.slow
def test_a_grader_that_fails_says_why(pool: GraderPool) -> None:
    payload = {"name": "no_such_set", "options": {}, "entry": {"answer": "1"}, "answer": "2"}
    with pytest.raises(RewardError, match=r"the reasoning_gym grader raised ValueError.*no_such_set"):
        pool.submit("reasoning_gym", payload, 10).result(60)


def test_a_limit_of_a_year_is_a_limit(pool: GraderPool) -> None:
    assert pool.submit("math", EASY, 366 * 86400.0).result(30).value == 1.0


def test_closing_while_others_take_jobs_ends() -> None:
    for _ in range(20):
        pool = GraderPool(workers=4)
        for _ in range(8):
            pool.submit("load", ("math", ""), 10)
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.slow
def test_a_worker_that_does_not_read_its_answer_is_replaced(pool: GraderPool) -> None:
    """An answer larger than a pipe, to a process that is stopped."""
    assert pool.submit("math", EASY, 10).result(30).value == 1.0
    [first] = pool.pids()
    os.kill(first, signal.SIGSTOP)
    large = {"gold": "1", "answer": "9" * 1_000_000}
    assert pool.submit("math", large, 0.5).result(30).outcome == "timeout"
    assert pool.submit("math", EASY, 10).result(30).value == 1.0
    assert not psutil.pid_exists(first)


def test_what_a_grader_imports_has_no_sections_of_run_files() -> None:
    """They are most of the start of a process that a user's function or a schema needs nothing of."""
    program = (
        "import sys\n"
        "import rollmill.user_code, rollmill.rewards.values, rollmill.rewards.text.json_schema\n"
        "assert not {'pydantic', 'torch', 'rollmill.config', 'rollmill.registry'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_processes_that_were_started_in_advance_are_taken_over(tmp_path: Path) -> None:
    """A manager that is set aside leaves its processes to the next one, which asks them."""
    (tmp_path / "mine.py").write_text("import os\n\ndef pid(task, completion):\n    return os.getpid()\n")
    function = {"name": "python", "function": f"{tmp_path}/mine.py:pid", "processes": 2, "run_in": "process"}
    config = PythonReward.model_validate(function)
    build_reward_manager([config]).set_aside()
    [pool] = resources._set_aside.values()
    wait_until(lambda: len(pool.pids()) == 2)
    started = set(pool.pids())
    with build_reward_manager([config]) as manager:
        assert not resources._set_aside
        found = asyncio.run(manager.score(Task("t", "p"), completion("text")))
        assert found.reward in started
        assert set(pool.pids()) == started
    build_reward_manager([config]).set_aside()
    [pool] = resources._set_aside.values()
    wait_until(lambda: len(pool.pids()) == 2)
    left = pool.pids()
    resources.close_set_aside()
    assert not resources._set_aside
    assert not any(psutil.pid_exists(pid) for pid in left)
