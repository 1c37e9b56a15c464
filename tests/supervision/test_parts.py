"""Parts of the supervisor: which failures may pass, the budget of restarts, smaller settings, and what is a stall."""

from __future__ import annotations

import errno
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run

from rollmill.config.loader import load_run, load_supervision
from rollmill.config.supervision import SupervisionConfig
from rollmill.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    EndpointLostError,
    EngineError,
    EngineLostError,
    GraderLostError,
    RewardError,
    StoreError,
    StoreLostError,
    TrainerRankLostError,
    TrainerRankMemoryError,
    TrainingError,
    UserExitError,
    is_out_of_memory,
    is_recoverable,
)
from rollmill.progress import (
    Progress,
    begin_uncounted_work,
    count_progress,
    does_uncounted_work,
    has_worked,
    reset_progress,
    uncounted_work,
)
from rollmill.supervision.attempt import RunAttempt
from rollmill.supervision.budget import RestartBudget, RunFailedError, RunOutcome
from rollmill.supervision.memory import MemoryReduction
from rollmill.supervision.supervisor import RunSupervisor
from rollmill.supervision.watchdog import StallWatchdog, blocked_in, write_stacks
from rollmill.trackers.event_log import read_events, record_event


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        DeadlineError("a", "b", 3.0, "Wait."),
        EngineLostError("gone"),
        StoreLostError("gone"),
        GraderLostError("gone"),
        TrainerRankLostError("gone"),
        TrainerRankMemoryError("full"),
        caused(RewardError("judge"), EndpointLostError("gone")),
        caused(EngineError("takes no more requests"), EngineLostError("gone")),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
        ExceptionGroup("several", [ValueError("x"), StoreLostError("gone")]),
    ],
)
def test_failures_that_may_pass(error: BaseException) -> None:
    assert is_recoverable(error)
    assert RunOutcome.of(error).recoverable
    assert is_out_of_memory(error) == (isinstance(error, TrainerRankMemoryError | MemoryError | RuntimeError))


def test_an_error_that_is_raised_from_itself_is_judged() -> None:
    lost, wrong = StoreLostError("gone"), RewardError("raised")
    assert is_recoverable(caused(lost, lost))
    assert not is_recoverable(caused(wrong, caused(ValueError("x"), wrong)))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong"),
        caused(ConfigError("wrong"), StoreLostError("gone")),
        UserExitError("sys.exit"),
        RewardError("raised"),
        EngineError("too long"),
        StoreError("disk is full"),
        TrainingError("the loss is nan"),
        CheckpointError("No space left"),
        RuntimeError("a bug"),
        OSError(28, "No space left"),
    ],
)
def test_failures_that_would_come_again(error: BaseException) -> None:
    assert not is_recoverable(error)
    assert not RunOutcome.of(error).recoverable


def test_outcomes_have_the_message_and_exit_code_of_the_command() -> None:
    assert (RunOutcome.of(ConfigError("wrong")).message, RunOutcome.of(ConfigError("wrong")).exit_code) == ("wrong", 2)
    assert RunOutcome.of(KeyboardInterrupt()).status == "interrupted"
    assert "sys.exit('enough')" in RunOutcome.of(SystemExit("enough")).message
    assert "no/such: " in RunOutcome.of(PermissionError(13, "Permission denied", "no/such")).message
    with pytest.raises(KeyError) as raised:
        raise KeyError("a bug")
    assert "Traceback" in RunOutcome.of(raised.value).message


def test_a_step_beyond_the_furthest_gives_restarts_back() -> None:
    budget = RestartBudget(SupervisionConfig(restarts=2, backoff_s=100.0))
    assert [budget.spend(), budget.spend(), budget.spend()] == [100.0, 200.0, None]
    budget.reach(0)
    assert budget.spend() is None
    budget.reach(3)
    assert budget.spend() == 100.0
    budget.reach(2)
    assert [budget.spend(), budget.spend()] == [200.0, None]
    patient = RestartBudget(SupervisionConfig(restarts=9, backoff_s=100.0))
    assert [patient.spend() for _ in range(4)] == [100.0, 200.0, 300.0, 300.0]


def test_smaller_settings_are_those_that_needed_the_memory(tmp_path: Path) -> None:
    loaded = load_run(tiny_run(tmp_path, trainer={"micro_batch_tokens": 100}))
    once = MemoryReduction().further("train, step 3 of 8, stage repair")
    smaller, changes = once.further("inference, step 3 of 8, stage repair").apply(loaded)
    assert [stage.trainer.micro_batch_tokens for stage in smaller.stages] == [25, 25]
    assert changes == ["trainer.micro_batch_tokens 25 instead of 100"]
    smaller, changes = MemoryReduction().further("roll out, step 3 of 8, stage repair").apply(loaded)
    assert smaller.stages[1].rollout.max_sequences == 8, "half of its 16 completions"
    assert "rollout.max_sequences 8 instead of 256" in changes
    assert MemoryReduction().apply(loaded) == (loaded, [])


def test_the_limit_of_stalls_exceeds_every_deadline(tmp_path: Path) -> None:
    loaded = load_run(tiny_run(tmp_path))
    assert loaded.config.supervise.stall_limit(loaded.stages) == 900.0
    loaded = load_run(tiny_run(tmp_path, reward_settings={"deadline_s": 3000.0}))
    assert loaded.config.supervise.stall_limit(loaded.stages) > 3000.0
    assert SupervisionConfig(stall_s=5.0).stall_limit(loaded.stages) == 5.0


@pytest.mark.parametrize(
    ("changes", "supervised"),
    [
        ({}, True),
        ({"mode": "train"}, True),
        ({"mode": "explore"}, False),
        ({"mode": "serve"}, False),
        ({"placement": "ray"}, False),
        ({"placement": {"name": "ray"}}, False),
        ({"supervise": {"restart": 1}}, False),
    ],
)
def test_supervision_is_read_without_the_rest(tmp_path: Path, changes: dict[str, Any], supervised: bool) -> None:
    (tmp_path / "user.py").write_text("raise RuntimeError('plugins are for the process that trains')\n")
    path = tiny_run(tmp_path, plugins=["user.py"], **changes)
    found = load_supervision(path, ["supervise.backoff_s=7"])
    assert (found is not None and found.backoff_s == 7.0) == supervised
    served = load_supervision(path, serves=True)
    assert (served is not None) == (supervised or changes.get("mode") == "serve")


def test_only_finished_work_is_progress() -> None:
    reset_progress()
    watchdog = StallWatchdog(os.getpid(), 0.05, 1.0)
    assert not watchdog.is_stalled()
    time.sleep(0.06)
    count_progress(Progress.VERDICTS)
    assert not watchdog.is_stalled()
    assert has_worked()
    time.sleep(0.06)
    assert watchdog.is_stalled()
    reset_progress()
    assert not has_worked()


def test_an_earlier_process_counts_nothing_in_a_later_attempt() -> None:
    reset_progress()
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(reads, 1)  # until there is a later attempt
        count_progress(Progress.TOKENS)
        begin_uncounted_work()
        os._exit(0)
    reset_progress()
    os.write(writes, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert not has_worked()
    assert not does_uncounted_work()


def test_a_supervisor_needs_no_disk_and_no_writable_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    attempt = RunAttempt(None, False, MemoryReduction())
    assert attempt.outcome() is None
    attempt.close()
    (tmp_path / "run").touch()  # in place of the directory
    lost = write_stacks(tmp_path / "run", "crash", "killed", "Thread 1")
    assert lost.startswith("; the stacks of its threads are lost: cannot write")
    assert "in " + str(tmp_path / "crash-1.txt") in write_stacks(tmp_path, "crash", "killed", "Thread 1")
    assert write_stacks(tmp_path, "crash", "killed", "") == ""


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    said: list[str] = []
    supervisor = RunSupervisor(SupervisionConfig(restarts=1, backoff_s=0.0), lambda attempt: {}, said.append)
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(RunFailedError, match=r"no process that trains could be started: Resource .*\n.*failed 2 times"):
        supervisor.run()
    assert "from the beginning" in said[0]


def test_a_damaged_line_of_events_is_an_event(tmp_path: Path) -> None:
    record_event(tmp_path, "restart", step=3)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'no event\n{"time": 1}\n{"time": 2.0, "eve')
    assert [row["event"] for row in read_events(tmp_path)] == ["restart", "damaged", "damaged"]
    record_event(tmp_path, "reduced")  # after half a line
    rows = read_events(tmp_path)
    assert [row["event"] for row in rows] == ["restart", "damaged", "damaged", "damaged", "reduced"]
    assert [row["line"] for row in rows[1:4]] == [2, 3, 4]
    assert rows[1]["time"] == rows[0]["time"]
    assert len(read_events(tmp_path, "restart")) == 1


def test_time_in_which_nobody_looked_does_not_count() -> None:
    watchdog = StallWatchdog(os.getpid(), 1.0, 0.01)
    time.sleep(0.1)
    assert not watchdog.is_stalled()
    assert watchdog.quiet_s <= 0.01


def test_while_loading_use_of_the_processor_is_progress() -> None:
    with uncounted_work():
        watchdog = StallWatchdog(os.getpid(), 0.4, 10.0)
        ends = time.monotonic() + 1.2
        looks = []
        while time.monotonic() < ends:
            worked = time.process_time()
            while time.process_time() < worked + 0.03:
                sum(range(1000))
            looks.append(watchdog.is_stalled())
    assert not any(looks)


STACKS = """\
Thread 0x00007f (most recent call first):
  File "{library}/threading.py", line 320 in wait

Current thread 0x00007e (most recent call first):
  File "/somewhere/site-packages/lib.py", line 3 in call
  File "/home/me/user.py", line 12 in mine
  File "{rollmill}/pipelines/pipeline.py", line 66 in process
  File "/home/me/.venv/bin/rollmill", line 8 in <module>
"""


def test_stacks_name_users_code_that_rollmill_called() -> None:
    library = sysconfig.get_path("stdlib")
    stacks = STACKS.format(rollmill=Path(__file__).resolve().parents[2] / "src/rollmill", library=library)
    assert blocked_in(stacks) == "/home/me/user.py:12 (mine)"
    assert blocked_in(stacks.replace("/home/me/user.py", f"{library}/other.py")) == ""
    assert blocked_in(stacks.replace("/home/me", "/checkout/libs/sandbox/src/rollmill_sandbox")) == ""
