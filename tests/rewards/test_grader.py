"""Grader processes of rewards: what they import, what they say, and those that were started in advance."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.reward_helpers import completion
from support.waiting import wait_until

from rollmill.rewards import build_reward_manager, resources
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rewards.worker_functions import REASONING_GYM
from rollmill.types import Task
from rollmill_grading.errors import GradingError
from rollmill_grading.grader_pool import GraderPool


@pytest.mark.slow
def test_a_grader_that_fails_says_why() -> None:
    payload = {"name": "no_such_set", "options": {}, "entry": {"answer": "1"}, "answer": "2"}
    pool = GraderPool()
    with pytest.raises(GradingError, match=r"the reasoning_gym grader raised ValueError.*no_such_set"):
        pool.submit(REASONING_GYM, payload, 10).result(60)
    pool.close()


def test_what_a_grader_imports_has_no_sections_of_run_files() -> None:
    """They are most of the start of a process that a user's function or a schema needs nothing of."""
    program = (
        "import sys\n"
        "import rollmill.user_code, rollmill.rewards.function_calls, rollmill.rewards.worker_functions\n"
        "import rollmill.rewards.text.json_schema\n"
        "assert not {'pydantic', 'torch', 'rollmill.config', 'rollmill.registry'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_processes_that_were_started_in_advance_are_taken_over(tmp_path: Path) -> None:
    """A manager that is kept warm leaves its processes to the next one, which asks them."""
    (tmp_path / "mine.py").write_text("import os\n\ndef pid(task, completion):\n    return os.getpid()\n")
    function = {"name": "python", "function": f"{tmp_path}/mine.py:pid", "processes": 2, "run_in": "process"}
    config = PythonReward.model_validate(function)
    build_reward_manager([config]).keep_warm()
    [pool] = resources._warm_pools.values()
    wait_until(lambda: len(pool.pids()) == 2)
    started = set(pool.pids())
    with build_reward_manager([config]) as manager:
        assert not resources._warm_pools
        found = asyncio.run(manager.score(Task("t", "p"), completion("text")))
        assert found.reward in started
        assert set(pool.pids()) == started
    build_reward_manager([config]).keep_warm()
    [pool] = resources._warm_pools.values()
    wait_until(lambda: len(pool.pids()) == 2)
    left = pool.pids()
    resources.close_warm_pools()
    assert not resources._warm_pools
    assert not any(psutil.pid_exists(pid) for pid in left)
