"""Processes of a run on Ray are killed, or stopped, at random moments: the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forks import Forks, ended, send
from support.tiny import outcome, tiny_run

import rollmill
from rollmill.errors import TrainingError
from rollmill.launch import resume
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.weights import shared_memory_folder

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, BATCH = 8, 16
REWARD = "import time\n\ndef mine(task, completion):\n    time.sleep(0.02)\n    return float('1' in completion.text)\n"
"""Judged in a process of its own, slowly enough for something to happen meanwhile."""
MORE = {"stages": None, "steps": STEPS, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "placement": "inline"}
ON_RAY = {"name": "ray", "explorers": 1}


def written(folder: Path, **changes: Any) -> Path:
    """The run file of a small run."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(REWARD)
    rewards = [{"name": "python", "function": f"{folder}/mine.py:mine", "processes": 1}]
    return tiny_run(folder, **MORE | {"rewards": rewards} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    rollmill.run(written(folder), out=folder / "out")
    return folder / "out"


def experiences(run: Path) -> list[list[tuple[Any, ...]]]:
    """Those of each step: ids, tokens and rewards; log-probs depend on what shares a batch by rounding."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    rows = [[json.loads(line) for line in file.open()] for file in files]
    return [sorted((row["id"], row["response"], row["reward"]) for row in step) for step in rows]


def learned(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def require_complete(run: Path) -> None:
    """All steps, each with a whole batch, and nothing was learned from twice."""
    found = experiences(run)
    assert [row["step"] for row in learned(run)] == list(range(1, STEPS + 1))
    assert [len(step) for step in found] == [BATCH] * STEPS
    assert len({one[0] for step in found for one in step}) == STEPS * BATCH
    assert outcome(run)["accuracy"][0] == "done"


def require_same(run: Path, whole: Path) -> None:
    require_complete(run)
    assert experiences(run) == experiences(whole)
    for key in ("loss", "grad_norm"):
        values, expected = ([row[key] for row in learned(each)] for each in (run, whole))
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-6)
    accuracies = [json.loads((each / "summary.json").read_text())["accuracy_after"] for each in (run, whole)]
    assert accuracies[0] == accuracies[1]


STARTED_BY = {"reward worker": ("explorer", "grader_worker")}


def process(run: Path, name: str) -> int:
    """The process that has this name in a run, or one that such a process has started. Raises LookupError."""
    known = {beat.name: beat.pid for beat in read_heartbeats(run)}
    if name not in STARTED_BY:
        return known[name]
    parent, program = STARTED_BY[name]
    parents = {pid for other, pid in known.items() if other.startswith(parent)}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _runs(folder, program, parents):
            return int(folder.name)
    raise LookupError(name)


def _runs(folder: Path, program: str, parents: set[int]) -> bool:
    try:
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return parent in parents and program in (folder / "cmdline").read_text()
    except OSError:
        return False


class Hurting:
    """A view that sends signals to processes of the run, each at a moment after a step."""

    def __init__(self, run: Path, seed: int, *blows: tuple[str, signal.Signals]) -> None:
        self._run, self._random = run, random.Random(seed)
        steps = sorted(self._random.sample(range(1, STEPS - 1), len(blows)))
        self._blows = dict(zip(steps, self._random.sample(blows, len(blows)), strict=True))
        self._timers: list[threading.Timer] = []
        self.dealt: list[str] = []
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, metrics: dict[str, Any], experiences: Sequence[Any]) -> None:
        if (blow := self._blows.pop(metrics["step"], None)) is not None:
            self._timers.append(threading.Timer(self._random.uniform(0, 0.5), self._hurt, [blow]))
            self._timers[-1].start()

    def close(self) -> None:
        for timer in self._timers:
            timer.join()

    def start(self, *nothing: Any) -> None: ...
    def resume(self, *nothing: Any) -> None: ...
    def evaluation(self, *nothing: Any) -> None: ...

    def _hurt(self, blow: tuple[str, signal.Signals]) -> None:
        if happens(lambda: process(self._run, blow[0]) > 0, 60.0) and send(process(self._run, blow[0]), blow[1]):
            self.dealt.append(blow[0])


def happens(condition: Callable[[], bool], limit_s: float) -> bool:
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        try:
            if condition():
                return True
        except LookupError:
            pass
        time.sleep(0.01)
    return False


def test_killed_at_random_moments(tmp_path: Path, whole: Path) -> None:
    out, kill = tmp_path / "out", signal.SIGKILL
    view = Hurting(out, 0, ("explorer 0", kill), ("reward worker", kill), ("trainer", kill))
    rollmill.run(written(tmp_path, placement=ON_RAY | {"explorers": 2}), out=out, view=view)
    assert sorted(view.dealt) == ["explorer 0", "reward worker", "trainer"]
    assert sum("the trainer died; it is started again" in text for text in view.messages) == 1
    require_same(out, whole)
    assert {beat.name: beat.ended for beat in read_heartbeats(out)}["trainer"] == "done"


@pytest.mark.thorough
def test_killed_while_explorers_run_ahead(tmp_path: Path) -> None:
    out, kill = tmp_path / "out", signal.SIGKILL
    view = Hurting(out, 5, ("explorer 1", kill), ("trainer rank 1", kill))
    more = {"max_staleness": 2, "trainer": {"lr": 1e-3, "ranks": 2}}
    rollmill.run(written(tmp_path, placement=ON_RAY | {"explorers": 2}, **more), out=out, view=view)
    assert sorted(view.dealt) == ["explorer 1", "trainer rank 1"]
    assert any("the trainer lost a rank; it is started again" in text for text in view.messages)
    require_complete(out)
    assert max(row["staleness/max"] for row in learned(out)) <= 2


@pytest.mark.thorough
def test_stopped_processes_are_killed_and_started_again(tmp_path: Path, whole: Path) -> None:
    out, stop = tmp_path / "out", signal.SIGSTOP
    view = Hurting(out, 3, ("explorer 0", stop), ("trainer", stop))
    rollmill.run(written(tmp_path, placement=ON_RAY | {"health_s": 5.0}), out=out, view=view)
    assert sorted(view.dealt) == ["explorer 0", "trainer"]
    assert any("the trainer did not answer for 5 s; it is started again" in text for text in view.messages)
    require_same(out, whole)


class Watching(Hurting):
    """A view that knows all processes of rank 1."""

    def __init__(self, run: Path, seed: int, *blows: tuple[str, signal.Signals]) -> None:
        super().__init__(run, seed, *blows)
        self.ranks: set[int] = set()

    def step(self, metrics: dict[str, Any], experiences: Sequence[Any]) -> None:
        self.ranks.add(process(self._run, "trainer rank 1"))
        super().step(metrics, experiences)


@pytest.mark.thorough
def test_ranks_end_with_their_trainer_and_it_starts_again_without_one_that_hangs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    view = Watching(out, 5, ("trainer rank 1", signal.SIGSTOP), ("trainer", signal.SIGKILL))
    ranks = {"lr": 1e-3, "ranks": 2, "sharding": "fsdp", "rank_deadline_s": 15}
    rollmill.run(written(tmp_path, placement=ON_RAY, trainer=ranks), out=out, view=view)
    assert sorted(view.dealt) == ["trainer", "trainer rank 1"]
    for how in ("lost a rank", "died"):
        assert sum(f"the trainer {how}; it is started again" in text for text in view.messages) == 1
    require_complete(out)
    assert len(view.ranks) == 3
    assert happens(lambda: all(map(ended, view.ranks)), 60.0)


class Interrupting(Hurting):
    """A view that sends the command Ctrl-C after the first step that it sees."""

    def step(self, metrics: dict[str, Any], experiences: Sequence[Any]) -> None:
        if not self.dealt:
            self.dealt.append("the command")
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.thorough
def test_the_command_itself_is_killed_and_resumed_and_interrupted(server: Forks, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "out"
    written(tmp_path, placement=ON_RAY)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: (out / "metrics.jsonl").exists() and len(learned(out)) >= 3)
    actors = [beat.pid for beat in read_heartbeats(out)]
    time.sleep(random.Random(4).uniform(0, 0.3))
    send(server.pid, signal.SIGKILL)
    server.wait()

    view = Interrupting(out, 0)
    with pytest.raises(KeyboardInterrupt):
        resume(out, view)  # at once: its trainer waits for the other one to end
    assert happens(lambda: all(map(ended, actors)), 30.0), "they end with their command"
    done = learned(out)[-1]["step"]
    assert view.messages[-1] == f"interrupted after step {done}; go on with: rollmill resume {out}"
    assert (out / f"checkpoints/step-{done:06d}").is_dir()
    assert {beat.name: beat.ended for beat in read_heartbeats(out)} == {"explorer 0": "done", "trainer": "interrupted"}

    resume(out)
    require_same(out, whole)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "out"
    rollmill.run(written(tmp_path, placement=ON_RAY), out=out)
    *_, before, newest = sorted((out / "checkpoints").glob("step-*"))
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    view = Hurting(out, 0)
    resume(out, view)
    says = f"the checkpoint of step {int(newest.name[5:])} is damaged (model.safetensors has 1,000 bytes"
    assert any(text.startswith(says) for text in view.messages)
    goes_on = f"the run goes on from the checkpoint of step {int(before.name[5:])}, the newest one that is whole"
    assert goes_on in view.messages
    assert (out / f"checkpoints/damaged-{newest.name[5:]}").is_dir()
    require_same(out, whole)


class Insisting(Interrupting):
    """A view that sends it twice."""

    def step(self, metrics: dict[str, Any], experiences: Sequence[Any]) -> None:
        super().step(metrics, experiences)
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_twice_nothing_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        rollmill.run(written(tmp_path, placement=ON_RAY), out=out, view=Insisting(out, 0))
    assert happens(lambda: all(ended(beat.pid) for beat in read_heartbeats(out)), 30.0)
    run_id = json.loads((out / "machine.json").read_text())["run_id"]
    assert not list(shared_memory_folder().glob(f"rollmill-{run_id}*"))


@pytest.mark.thorough
def test_a_ray_that_dies_ends_the_run(server: Forks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written(tmp_path, placement=ON_RAY, steps=1000)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: (out / "metrics.jsonl").exists() and len(learned(out)) >= 1, limit_s=280)
    for child in psutil.Process(server.pid).children(recursive=True):
        if child.name() == "raylet":
            child.kill()
    found = server.wait()
    assert found.code == 1, found.err
    assert "Ray has died after step " in found.err
    assert " of 1000; go on with: rollmill resume" in found.err


@pytest.mark.thorough
@pytest.mark.parametrize("closes_s", [600, pytest.param(0.5, id="ends by itself before Ray's death is noticed")])
def test_a_run_that_is_complete_when_ray_dies_is_done(server: Forks, tmp_path: Path, closes_s: float) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\nimport rollmill\n\n\n@rollmill.tracker\nclass slow:\n"
        "    def __init__(self, run):\n        self.folder = run.folder\n\n"
        "    def write(self, metrics, experiences=()): ...\n\n"
        "    def close(self):  # called after the last step\n        (self.folder / 'closing').touch()\n"
        "        while not (self.folder / 'dead').exists():\n            time.sleep(0.01)\n"
        f"        time.sleep({closes_s})\n"
    )
    more = {"plugins": ["slow.py"], "monitor": {"trackers": ["slow"], "report": True}, "steps": 2}
    written(tmp_path, placement=ON_RAY, **more)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: (tmp_path / "out/closing").exists())
    [service] = [each for each in psutil.Process(server.pid).children(recursive=True) if each.name() == "gcs_server"]
    service.kill()
    (tmp_path / "out/dead").touch()
    found = server.wait()
    assert found.code == 0, found.err
    assert ("Ray has died after the last step; the run is complete" in found.out) == (closes_s == 600)
    assert "done: 2 steps" in found.out
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "done"
    assert (tmp_path / "out/report.html").exists()


@pytest.mark.thorough
def test_a_trainer_that_stalls_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "stall.py").write_text(
        "import time\nfrom pathlib import Path\n\nimport rollmill\n\n\n@rollmill.operator\ndef stall(batch):\n"
        f"    mark = Path('{tmp_path}/stalled')\n    if not mark.exists():\n        mark.touch()\n"
        "        time.sleep(1000)\n"
    )
    more = {"plugins": [f"{tmp_path}/stall.py"], "pipeline": ["stall"], "evaluation": None, "steps": 3}
    view = Hurting(tmp_path / "out", 1)
    supervise = {"stall_s": 6.0, "backoff_s": 0.0}
    rollmill.run(written(tmp_path, placement=ON_RAY, supervise=supervise, **more), out=tmp_path / "out", view=view)
    [told] = [text for text in view.messages if "made no progress" in text]
    assert "stall.py:" in told
    assert "stall.py" in (tmp_path / "out/stall-1.txt").read_text()
    assert json.loads((tmp_path / "out/summary.json").read_text())["restarts"] == 1


@pytest.mark.parametrize(("ranks", "how"), [pytest.param(1, "failed", marks=pytest.mark.thorough), (2, "lost a rank")])
def test_after_running_out_of_memory_micro_batches_are_smaller(tmp_path: Path, ranks: int, how: str) -> None:
    (tmp_path / "full.py").write_text(
        "from pathlib import Path\n\nimport torch\n\nimport rollmill\n\ncalls = 0\n\n\n"
        "@rollmill.loss\ndef full(logprob, advantage):\n    global calls\n    calls += 1\n"
        f"    mark = Path('{tmp_path}/failed')\n"
        f"    last = {ranks} == 1 or torch.distributed.get_rank() == 1\n"
        "    if last and calls == 3 and not mark.exists():\n        mark.touch()\n"
        "        raise torch.OutOfMemoryError('no memory')\n    return -advantage * logprob\n"
    )
    view = Hurting(tmp_path / "out", 1)
    own = {"plugins": [f"{tmp_path}/full.py"], "algorithm": {"name": "grpo", "loss": {"name": "full"}}, "steps": 3}
    settings = {"lr": 1e-3, "micro_batch_tokens": 128, "ranks": ranks}
    path = written(tmp_path, placement=ON_RAY, trainer=settings, supervise={"backoff_s": 0.0}, evaluation=None, **own)
    rollmill.run(path, out=tmp_path / "out", view=view)
    assert any(text.startswith(f"the trainer {how}; it is started again") for text in view.messages)
    assert "after running out of memory: trainer.micro_batch_tokens 64 instead of 128" in view.messages
    kinds = [json.loads(line)["event"] for line in (tmp_path / "out/events.jsonl").open()]
    assert kinds == ["restart", "reduced"]
    assert [row["step"] for row in learned(tmp_path / "out")] == [1, 2, 3]


@pytest.mark.thorough
def test_a_trainer_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text(
        "import os\n\nimport rollmill\n\n\n@rollmill.operator\ndef die(experience):\n    os.kill(os.getpid(), 9)\n"
    )
    more = {"plugins": [f"{tmp_path}/die.py"], "pipeline": ["die"], "evaluation": None}
    path = written(tmp_path, placement=ON_RAY, supervise={"restarts": 1, "backoff_s": 0.0}, **more)
    with pytest.raises(
        TrainingError, match=r"the trainer died\. It failed 2 times after step 0 .* or go on with: rollmill resume"
    ):
        rollmill.run(path, out=tmp_path / "out")
