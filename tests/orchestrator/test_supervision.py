"""Failures that may pass: `rollmill run` and `rollmill resume` start the process that trains again."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.forks import Ended, ForkedPopen, Forks, ended, send
from support.tiny import metrics, outcome, tiny_run, trainer
from support.waiting import wait_until

from rollmill.trackers.heartbeat import read_heartbeats

AGAIN = {"restarts": 2, "backoff_s": 0.0}
RL: dict[str, Any] = {
    "stages": None,
    "steps": 6,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "evaluation": None,
    "supervise": AGAIN,
}
HEADER = "import json, os, pathlib, signal, time\nimport rollmill\nfrom rollmill import errors\ncalls = 0\n"
OPERATOR = "@rollmill.operator\ndef mine(batch):\n    global calls\n    calls += 1\n"
ALWAYS = "    if calls == 9:\n        pathlib.Path('failed').touch()\n    if pathlib.Path('failed').exists():\n        "
ONCE = "    if calls == 9 and not pathlib.Path('failed').exists():\n        pathlib.Path('failed').touch()\n        "
OPERATES: dict[str, Any] = {"plugins": ["user.py"], "pipeline": [{"name": "mine"}]}


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"version"') if path.exists() else 0


def events(run: Path, kind: str = "restart") -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["event"] == kind]


def operated(server: Forks, folder: Path, body: str, **changes: Any) -> Ended:
    """A run with an operator, which is called four times a step."""
    (folder / "user.py").write_text(HEADER + OPERATOR + body + "\n")
    tiny_run(folder, **RL | OPERATES | changes)
    return server.run("run", "run.yaml", "--out", "out", folder=folder)


@pytest.fixture(scope="module")
def whole(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert operated(server, folder, "    pass").code == 0
    return folder / "out"


# -- what starts again --------------------------------------------------------------------------------------------


def test_a_killed_process_starts_again_and_the_run_is_that_of_before(
    server: Forks, whole: Path, tmp_path: Path
) -> None:
    end = operated(server, tmp_path, ONCE + "os.kill(os.getpid(), signal.SIGKILL)", monitor={"report": True})
    assert end.code == 0, end.err
    run = tmp_path / "out"
    assert outcome(run) == outcome(whole)
    assert "killed by SIGKILL" in end.out
    assert "restart 1 of 2" in end.out
    assert "resumed after step 2" in end.out
    [restart] = events(run)
    assert (restart["step"], "SIGKILL" in restart["reason"]) == (2, True)
    assert json.loads((run / "summary.json").read_text())["restarts"] == 1
    assert "<td>restart</td>" in (run / "report.html").read_text()
    shown = server.run("status", "out", folder=tmp_path)
    assert "restarts: 1, the last one" in shown.out
    assert json.loads(server.run("status", "out", "--json", folder=tmp_path).out)["restarts"] == [restart]


def test_a_restart_that_cannot_be_recorded_is_made(server: Forks, whole: Path, tmp_path: Path) -> None:
    spoil = "pathlib.Path('out/events.jsonl').mkdir()\n        "
    end = operated(server, tmp_path, ONCE + spoil + "os.kill(os.getpid(), signal.SIGKILL)")
    assert end.code == 0, end.err
    assert "the restart is not recorded: cannot write out/events.jsonl" in end.out
    assert outcome(tmp_path / "out") == outcome(whole)


def test_a_supervisor_that_was_stopped_takes_that_for_no_signal(server: Forks, whole: Path, tmp_path: Path) -> None:
    then = "\n        "
    stop = f"os.kill(os.getppid(), signal.SIGSTOP){then}time.sleep(0.6){then}os.kill(os.getppid(), signal.SIGCONT)\n"
    end = operated(
        server, tmp_path, ONCE + stop + "        time.sleep(0.3)\n        os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert end.code == 0, end.err
    assert "restart 1 of 2" in end.out
    assert outcome(tmp_path / "out") == outcome(whole)


def test_a_lost_store_leaves_a_checkpoint_of_the_last_step(server: Forks, whole: Path, tmp_path: Path) -> None:
    end = operated(
        server, tmp_path, ONCE + "raise errors.StoreLostError('the database is away')", checkpoint={"every": 50}
    )
    assert end.code == 0, end.err
    assert "the database is away" in end.out
    assert "resumed after step 2" in end.out, "though no checkpoint was due"
    assert outcome(tmp_path / "out") | {"checkpoints": None} == outcome(whole) | {"checkpoints": None}


@pytest.mark.slow
def test_after_running_out_of_memory_micro_batches_are_smaller(server: Forks, tmp_path: Path) -> None:
    loss = "@rollmill.loss\ndef mine(logprob, advantage):\n    global calls\n    calls += 1\n"
    raises = ONCE.replace("== 9", "== 5") + "import torch\n        raise torch.OutOfMemoryError('no memory')\n"
    (tmp_path / "user.py").write_text(HEADER + loss + raises + "    return -advantage * logprob\n")
    own = {"plugins": ["user.py"], "algorithm": {"name": "grpo", "loss": {"name": "mine"}}}
    tiny_run(tmp_path, **RL | own | {"trainer": {"lr": 1e-3, "micro_batch_tokens": 128}})
    end = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert end.code == 0, end.err
    assert "after running out of memory: trainer.micro_batch_tokens 64 instead of 128" in end.out
    assert events(tmp_path / "out", "reduced")[0]["changes"] == ["trainer.micro_batch_tokens 64 instead of 128"]
    assert "micro_batch_tokens: 128" in (tmp_path / "out/config.yaml").read_text(), "the run file stays"
    assert server.run("run", "run.yaml", "--out", "again", folder=tmp_path).code == 0
    assert not events(tmp_path / "again")
    keys = ("loss", "grad_norm", "reward/mean")
    rows, wanted = ([{key: row[key] for key in keys} for row in metrics(tmp_path / name)] for name in ("out", "again"))
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)


LOSS = "import torch\n@rollmill.loss\ndef mine(logprob, advantage):\n    global calls\n    calls += 1\n"
IN_PROCESS = {
    "the process that trains": "    where = not torch.distributed.is_initialized()\n",
    "rank 1": "    where = torch.distributed.get_rank() == 1\n",
}
FIRST = "    if where and calls == 3 and not pathlib.Path('failed').exists():\n        pathlib.Path('failed').touch()\n"
RETURN = "    return -advantage * logprob\n"


def learned_with(server: Forks, folder: Path, process: str, does: str) -> Ended:
    """A run whose loss does something once, in one of its processes."""
    (folder / "user.py").write_text(HEADER + LOSS + IN_PROCESS[process] + FIRST + does + RETURN)
    settings = {"lr": 1e-3, "micro_batch_tokens": 128, "ranks": 2 if process == "rank 1" else 1}
    own = {"plugins": ["user.py"], "algorithm": {"name": "grpo", "loss": {"name": "mine"}}, "trainer": settings}
    tiny_run(folder, **RL | own | {"steps": 4})
    return server.run("run", "run.yaml", "--out", "out", folder=folder)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_starts_again_with_smaller_micro_batches(server: Forks, tmp_path: Path) -> None:
    end = learned_with(server, tmp_path, "rank 1", "        raise torch.OutOfMemoryError('no memory')\n")
    assert end.code == 0, end.err
    assert "rank 1" in end.out
    assert "failed: OutOfMemoryError: no memory" in end.out
    assert "after running out of memory: trainer.micro_batch_tokens 64 instead of 128" in end.out
    assert len(events(tmp_path / "out")) == len(events(tmp_path / "out", "reduced")) == 1
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4]


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, for a process that moves into it, and the one that counts its kills."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"rollmill-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
            yield group / "cgroup.procs"
            wait_until(lambda group=group: not (group / "cgroup.procs").read_text())
            group.rmdir()
            return
        if group.is_dir():
            group.rmdir()
    pytest.skip("this user cannot make a control group that limits memory")


@pytest.mark.slow
@pytest.mark.parametrize("process", list(IN_PROCESS))
def test_a_process_that_the_kernel_kills_for_its_memory_starts_again_with_smaller_micro_batches(
    server: Forks, tmp_path: Path, small_group: Path, process: str
) -> None:
    counts = {  # whose process counts the kills
        "the process that trains": "os.getppid()",
        "rank 1": "json.loads(pathlib.Path('out/processes/trainer.json').read_text())['pid']",
    }[process]
    moves = f"for pid in ({counts}, os.getpid()):\n            pathlib.Path('{small_group}').write_text(str(pid))"
    fills = f"        {moves}\n        bytearray(1 << 30)[::4096]\n"
    end = learned_with(server, tmp_path, process, fills)
    assert end.code == 0, end.err
    assert process in end.out
    assert "the kernel has killed it because memory ran out" in end.out
    assert "after running out of memory: trainer.micro_batch_tokens 64 instead of 128" in end.out
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_stalled_run_is_started_again_and_ends_with_the_place(server: Forks, tmp_path: Path) -> None:
    block = "while True:\n            time.sleep(0.05)"
    end = operated(server, tmp_path, ALWAYS + block, supervise={"restarts": 1, "backoff_s": 0.0, "stall_s": 2.0})
    assert end.code == 1, end.out
    assert "made no progress" in end.err
    assert "user.py:" in end.err
    assert "(mine)" in end.err
    assert "failed 2 times" in end.err
    assert "Traceback" not in end.err
    for number in (1, 2):
        text = (tmp_path / f"out/stall-{number}.txt").read_text()
        assert "user.py" in text
        assert "orchestrator" in text
    assert len(events(tmp_path / "out")) == 1


# -- what does not ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_once_too_often_is_a_failure(server: Forks, tmp_path: Path) -> None:
    end = operated(server, tmp_path, ALWAYS + "os.kill(os.getpid(), signal.SIGKILL)")
    assert end.code == 1
    assert "was killed by SIGKILL" in end.err
    assert "It failed 3 times after step 2 (supervise.restarts); go on with: rollmill resume out" in end.err
    assert end.err.count("SIGKILL") == 1, "the last message stands once"
    assert len(events(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    raise ValueError('wrong data')", "wrong data"),
        ("    os._exit(0)", "without a result: users' code has ended it"),
    ],
)
def test_errors_of_users_code_are_not_repeated(server: Forks, tmp_path: Path, body: str, says: str) -> None:
    end = operated(server, tmp_path, body)
    assert end.code == 1
    assert end.err.count(says) == 1
    assert not events(tmp_path / "out")


def test_a_failure_before_any_work_is_not_repeated(server: Forks, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "from rollmill.errors import StoreLostError\ndef rows():\n    raise StoreLostError('nobody is there')\n"
    )
    tiny_run(tmp_path, **RL | {"taskset": {"function": "rows.py:rows", "options": None}})
    end = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert end.code == 1
    assert "nobody is there" in end.err
    assert "restart" not in end.out


def test_without_restarts_the_command_trains_itself(server: Forks, tmp_path: Path) -> None:
    body = "    pathlib.Path('pid').write_text(str(os.getpid()))\n    raise errors.StoreLostError('nobody is there')"
    end = operated(server, tmp_path, body, supervise={"restarts": 0})
    assert end.code == 1
    assert end.err.strip() == "nobody is there"
    assert int((tmp_path / "pid").read_text()) == server.pid


# -- signals ------------------------------------------------------------------------------------------------------


def test_the_process_that_trains_ends_with_the_command(server: Forks, tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 2000})
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: steps(tmp_path / "out") >= 1)
    pid = trainer(tmp_path / "out")
    assert pid != server.pid
    assert send(server.pid)
    server.wait()
    wait_until(lambda: ended(pid))


def in_a_group(folder: Path) -> ForkedPopen:
    """Start `rollmill run` as the first process of a group."""
    command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", "out"]
    pipe = subprocess.PIPE
    return ForkedPopen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_counts_once(tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 2000, "checkpoint": {"every": 1000}})
    run = in_a_group(tmp_path)
    wait_until(lambda: steps(tmp_path / "out") >= 1)
    os.killpg(run.pid, signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert list((tmp_path / "out/checkpoints").glob("step-*")), "the second signal would end it at once"
    assert said.count("ending with a checkpoint of the last step") == 1


@pytest.mark.slow
def test_a_signal_to_the_whole_group_ends_a_run_that_is_loading(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "import pathlib, time\ndef rows():\n    pathlib.Path('loading').touch()\n    time.sleep(1000)\n"
    )
    tiny_run(tmp_path, **RL | {"taskset": {"function": "rows.py:rows", "options": None}})
    run = in_a_group(tmp_path)
    wait_until((tmp_path / "loading").exists)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the first process of the terminal alone, and nothing can be printed any more."""
    tiny_run(tmp_path, **RL | {"steps": 2000, "checkpoint": {"every": 1000}})
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
        command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", "out"]
        os.execve(sys.executable, command, os.environ | {"TERM": "xterm"})

    def works() -> bool:
        if select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 65536)
        return steps(tmp_path / "out") >= 1

    wait_until(works)
    os.close(terminal)
    wait_until(lambda: ended(pid))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert list((tmp_path / "out/checkpoints").glob("step-*"))
    assert [beat.ended for beat in read_heartbeats(tmp_path / "out")] == ["interrupted"]
