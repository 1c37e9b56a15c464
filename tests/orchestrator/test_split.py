"""Explorers and a trainer as processes of their own: they compute what one process does, and survive each other."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forks import Forks, ended, forks, send
from support.paced import CUT, HELD, SEQUENTIAL, asked, begun, forget_begun, hold, release, write_paced
from support.postgres import Postgres
from support.tiny import merged, outcome, require_log_probs, tiny_run, trainer

from rollmill.buffer import ExperienceKind, open_run_store
from rollmill.buffer.base import EXPLORER, version_segments
from rollmill.trackers import read_metrics
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.trackers.rollout_log import load_experiences
from rollmill.types import StopReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "evaluation": None}
SLOW = {"name": "python", "function": "mine.py:mine"}
SLOW_REWARD = (
    "import time\ndef mine(task, completion):\n    time.sleep(0.03)\n    return float('1' in completion.text)\n"
)
PACED: dict[str, Any] = RL | {"taskset": SEQUENTIAL, "rewards": [HELD]}
"""Training that `hold` and `release` let go on, however fast it is."""


@pytest.fixture(scope="module")
def servers(server: Forks) -> Iterator[list[Forks]]:
    """Three, since each runs one command at a time."""
    with ExitStack() as stack:
        yield [server, *(stack.enter_context(forks()) for _ in range(2))]


def start(server: Forks, folder: Path, mode: str, *more: str) -> int:
    return server.start("run", "run.yaml", "--set", f"mode={mode}", "--out", "out", *more, folder=folder)


def steps(folder: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in read_metrics(folder / "out")]


def paced_run(folder: Path, *, after: int | None, **changes: Any) -> None:
    """Write the run file of a run that stands still after some steps (None: never)."""
    write_paced(folder, steps=changes["steps"])
    tiny_run(folder, **merged(PACED, changes))
    if after is not None:
        hold(folder, after=after)


def joined(folder: Path) -> list[str]:
    """Names of the explorers that have joined the run."""
    return [each.name for each in read_heartbeats(folder / "out") if each.name.startswith("explorer")]


def fine(server: Forks) -> str:
    done = server.wait()
    assert done.code == 0, done.err + done.out
    return done.out


def both_and_split(servers: list[Forks], folder: Path, **changes: Any) -> tuple[Path, Path]:
    """The same run file, in one process and in two."""
    tiny_run(folder, **changes)
    one = servers[0].run("run", "run.yaml", "--out", "both", folder=folder)
    assert one.code == 0, one.err
    start(servers[1], folder, "explore")
    start(servers[0], folder, "train")
    fine(servers[0])
    assert "the run is done" in fine(servers[1])
    return folder / "both", folder / "out"


def learned(run: Path) -> list[tuple[Any, ...]]:
    """What was rolled out or evaluated, and how it was judged; without log-probs, which what shares a batch rounds."""
    files = sorted([*(run / "rollouts").glob("*.jsonl"), *(run / "evaluations").glob("*.jsonl")])
    rows = [json.loads(line) for file in files for line in file.open()]
    return [(row["id"], row["response"], row["reward"]) for row in rows]


def test_one_explorer_and_no_staleness_is_the_same_as_one_process(servers: list[Forks], tmp_path: Path) -> None:
    runs = both_and_split(servers, tmp_path, **RL, steps=6)
    assert learned(runs[1]) == learned(runs[0])
    one, two = map(outcome, runs)
    for key in ("state", "generated", "checkpoints", "accuracy"):
        assert two[key] == one[key]
    for ours, expected in zip(two["metrics"], one["metrics"], strict=True):
        assert ours.pop("stage") == expected.pop("stage")
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_stages_and_evaluations_are_the_same_as_in_one_process(servers: list[Forks], tmp_path: Path) -> None:
    one, two = both_and_split(servers, tmp_path)
    assert learned(two) == learned(one)
    assert len(learned(one)) > 100
    evaluated = [json.loads((run / "summary.json").read_text())["evaluations"] for run in (one, two)]
    assert evaluated[1] == evaluated[0]
    losses = [
        [json.loads(row)["loss"] for row in (run / "metrics.jsonl").open() if "loss" in row] for run in (one, two)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_an_early_stop_is_noted_by_all(servers: list[Forks], tmp_path: Path) -> None:
    """Weights that do not change do not become better, whatever the explorers generate."""
    stop = {"early_stop": {"metric": "eval/greedy", "patience": 1}, "max_staleness": 2}
    stages = [{"name": "first", "steps": 9} | stop, {"name": "second", "steps": 3, "max_staleness": 0}]
    changes = RL | {"stages": stages, "evaluation": {"every": 2}, "trainer": {"lr": 1e-12}}
    tiny_run(tmp_path, **changes)
    start(servers[1], tmp_path, "explore")
    start(servers[0], tmp_path, "train")
    fine(servers[0])
    fine(servers[1])
    rows = [row for row in steps(tmp_path) if "stage" in row]
    second = [row for row in rows if row["stage"] == "second"]
    assert len(second) == 3
    assert len(rows) < 12
    for row in second:
        text = (tmp_path / f"out/rollouts/step-{row['step']:06d}.jsonl").read_text()
        assert {json.loads(line)["group"].partition("-")[0] for line in text.splitlines()} == {"second"}


def require_sound(folder: Path, count: int, staleness: int) -> list[dict[str, Any]]:
    """Every step was made once, within the bound, and no group was learned from twice; the steps."""
    rows = steps(folder)
    assert [row["step"] for row in rows] == list(range(1, count + 1))
    assert max(row["staleness/max"] for row in rows) <= staleness
    files = sorted((folder / "out/rollouts").glob("*.jsonl"))
    learned = [json.loads(line) for file in files for line in file.open()]
    ids = [row["id"] for row in learned]
    assert len(ids) == len(set(ids)) == count * 4 * 4
    for file in files:
        step = int(file.stem.partition("-")[2])
        versions = [v for line in file.open() for v in json.loads(line)["versions"] if v >= 0]
        assert min(versions) >= step - 1 - staleness
    store = open_run_store(folder / "out")
    kept = [group.id for _, group in store.read(ExperienceKind.ROLLOUT)]
    store.close()
    assert len(kept) == len(set(kept)) >= count * 4
    return rows


def test_two_explorers_stay_within_the_bound(servers: list[Forks], tmp_path: Path) -> None:
    paced_run(tmp_path, after=3, steps=10, max_staleness=2)
    for server in servers[1:]:
        start(server, tmp_path, "explore")
    start(servers[0], tmp_path, "train")
    wait_until(lambda: asked(tmp_path, step=6) and len(joined(tmp_path)) == 2, servers[0])
    release(tmp_path)
    fine(servers[0])
    shares = [int(fine(server).split("the run is done; ")[1].split()[0]) for server in servers[1:]]
    assert sum(shares) >= 10 * 4
    rows = require_sound(tmp_path, 10, 2)
    assert rows[5]["staleness/max"] == 2, "its completions were there after three steps"
    ended = {each.name: each.ended for each in read_heartbeats(tmp_path / "out")}
    assert ended == {"explorer 0": "done", "explorer 1": "done", "trainer": "done"}


def test_a_budget_is_shared_and_what_it_cuts_goes_on_wherever_there_is_room(
    servers: list[Forks], tmp_path: Path
) -> None:
    """With weights that do not change, completions are those of one process without a budget, wherever they are cut."""
    still = RL | {"steps": 5, "trainer": {"lr": 1e-12}, "max_staleness": 2, "checkpoint": {"every": 100}}
    write_paced(tmp_path, steps=5)
    tiny_run(tmp_path, **still)
    one = servers[0].run("run", "run.yaml", "--out", "both", folder=tmp_path)
    assert one.code == 0, one.err
    tiny_run(tmp_path, **merged(still, CUT))
    for server in servers[1:]:
        start(server, tmp_path, "explore")
    start(servers[0], tmp_path, "train")
    fine(servers[0])
    shares = [int(fine(server).split("the run is done; ")[1].split()[0]) for server in servers[1:]]
    rows = require_sound(tmp_path, 5, 2)
    assert sum(row["rollout/partial"] for row in rows) == sum(row["rollout/continued"] for row in rows) > 0
    assert sum(shares) > 5 * 4, "some groups were rolled out in parts"
    assert sorted(learned(tmp_path / "out")) == sorted(learned(tmp_path / "both"))
    logprobs = [
        {each.id: each.logprobs for step in range(1, 6) for each in load_experiences(folder, step=step)}
        for folder in (tmp_path / "out", tmp_path / "both")
    ]
    for id, expected in logprobs[1].items():
        np.testing.assert_allclose(logprobs[0][id], expected, atol=1e-5)


def test_what_a_budget_has_cut_outlives_who_is_killed(servers: list[Forks], tmp_path: Path) -> None:
    """An explorer dies and comes back, then the trainer: groups are learned from in order, once, and every token has
    the log-prob of the weights it carries the version of."""
    (tmp_path / "mine.py").write_text(SLOW_REWARD)
    changes = {"steps": 10, "rewards": [SLOW], "trainer_away_s": 60, "checkpoint": {"every": 1, "keep_last": 99}}
    paced_run(tmp_path, after=3, **merged(CUT, changes))
    trainer, explorer, other = servers
    start(trainer, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    start(other, tmp_path, "explore")
    for reached, dies in ((3, explorer), (6, trainer)):
        wait_until(lambda reached=reached: begun(tmp_path, step=reached + 3), trainer)  # type: ignore[misc]
        assert send(dies.pid)
        dies.wait()
        if dies is explorer:
            start(explorer, tmp_path, "explore")
            hold(tmp_path, after=6)
        else:
            forget_begun(tmp_path)
            trainer.start("resume", "out", folder=tmp_path)
    release(tmp_path)
    for server in servers:
        fine(server)
    rows = require_sound(tmp_path, 10, 2)
    assert sum(row["rollout/continued"] for row in rows) > 0
    experiences = [each for step in range(1, 11) for each in load_experiences(tmp_path / "out", step=step)]
    assert [each.id for each in experiences] == [f"train-{n:06d}/{index}" for n in range(40) for index in range(4)]
    pieced = [each for each in experiences if len(version_segments(each)) > 1]
    assert {1, 2, 4, 5, 6, 7} < require_log_probs(tmp_path / "out", pieced).keys()


def test_over_sampling_and_repetition_end_rollouts_of_explorers(servers: list[Forks], tmp_path: Path) -> None:
    repetition = {"period": 2, "times": 2, "tokens": 2, "penalty": 0.25}
    rollout = {"oversample": 0.5, "repetition": repetition}
    (tmp_path / "mine.py").write_text(SLOW_REWARD)
    tiny_run(tmp_path, **RL | {"steps": 4, "rollout": rollout, "rewards": [SLOW]})
    for server in servers[1:]:
        start(server, tmp_path, "explore")
    start(servers[0], tmp_path, "train")
    for server in servers:
        fine(server)
    rows = require_sound(tmp_path, 4, 0)
    assert [row["rollout/stopped"] for row in rows] == [2] * 4
    assert all(row["rollout/wasted_tokens"] >= 0 for row in rows)
    experiences = [each for step in range(1, 5) for each in load_experiences(tmp_path / "out", step=step)]
    ended = [each.stop_reason is StopReason.REPETITION for each in experiences]
    assert 0 < sum(ended) < len(ended)
    for each, repeated in zip(experiences, ended, strict=True):
        assert each.reward_parts["rollout/repetition"] == (-0.25 if repeated else 0.0)


@pytest.mark.service
def test_trainer_and_explorers_meet_in_postgresql(pg: Postgres, servers: list[Forks], tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 6, "max_staleness": 1, "buffer": {"url": pg.url}})
    for server in servers[1:]:
        start(server, tmp_path, "explore")
    start(servers[0], tmp_path, "train")
    for server in servers:
        fine(server)
    require_sound(tmp_path, 6, 1)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_whoever_is_killed_goes_on(servers: list[Forks], tmp_path: Path, seed: int) -> None:
    """The explorer dies and comes back, and so does the trainer, at random moments; one explorer lives on."""
    chance = random.Random(seed)
    (tmp_path / "mine.py").write_text(SLOW_REWARD)
    paced_run(tmp_path, after=5, steps=16, max_staleness=2, rewards=[HELD, SLOW], trainer_away_s=60)
    trainer, explorer, other = servers
    start(trainer, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    start(other, tmp_path, "explore")
    for reached in (3, 7, 11):
        wait_until(lambda reached=reached: len(steps(tmp_path)) >= reached, trainer)  # type: ignore[misc]
        time.sleep(0.3 * chance.random())
        dies = explorer if reached == 3 else trainer
        assert send(dies.pid)
        dies.wait()
        time.sleep(chance.random())
        if dies is explorer:
            start(explorer, tmp_path, "explore")
        else:
            trainer.start("resume", "out", folder=tmp_path)
        hold(tmp_path, after=reached + 6)
    release(tmp_path)
    fine(trainer)
    fine(explorer)
    fine(other)
    require_sound(tmp_path, 16, 2)
    store = open_run_store(tmp_path / "out")
    writers = {group.writer for _, group in store.read(ExperienceKind.ROLLOUT)}
    store.close()
    assert writers == {EXPLORER}


def test_a_killed_trainer_is_started_again_by_its_command(servers: list[Forks], tmp_path: Path) -> None:
    paced_run(tmp_path, after=5, steps=8, max_staleness=2, trainer_away_s=60)
    command, explorer, _ = servers
    start(command, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    wait_until(lambda: len(steps(tmp_path)) >= 3, command)
    assert send(trainer(tmp_path / "out"))
    release(tmp_path)
    fine(command)
    fine(explorer)
    require_sound(tmp_path, 8, 2)
    assert json.loads((tmp_path / "out/summary.json").read_text())["restarts"] == 1


def test_an_evaluation_whose_explorer_dies_is_made_by_another(servers: list[Forks], tmp_path: Path) -> None:
    evaluation = {"every": 2, "rewards": [HELD]}
    paced_run(tmp_path, after=0, steps=4, rewards=None, evaluation=evaluation)
    trainer, *explorers = servers
    start(trainer, tmp_path, "train")
    for server in explorers:
        start(server, tmp_path, "explore")

    at_it: list[int] = []

    def evaluating() -> bool:
        doing = {each.name: each for each in read_heartbeats(tmp_path / "out")}
        if "trainer" not in doing or not doing["trainer"].doing.startswith("evaluate"):
            return False
        explorers = [each for name, each in doing.items() if name.startswith("explorer")]
        at_it[:] = [each.pid for each in explorers if each.doing == "roll out"]
        return bool(at_it)

    wait_until(evaluating, trainer)
    assert send(at_it[0])
    release(tmp_path)
    fine(trainer)
    ends = [server.wait().code for server in explorers]
    assert sorted(ends) == [-signal.SIGKILL, 0]
    evaluated = json.loads((tmp_path / "out/summary.json").read_text())["evaluations"]
    assert [each["step"] for each in evaluated] == [0, 2, 4]


def stop_one(folder: Path, servers: list[Forks], **changes: Any) -> tuple[Forks, Forks]:
    """Start a run with two explorers, and stop one of them while it rolls out; returns it, and the other one."""
    paced_run(folder, **{"max_staleness": 1} | changes)
    trainer, *explorers = servers
    start(trainer, folder, "train")
    for server in explorers:
        start(server, folder, "explore")
    at_work: list[int] = []

    def waits() -> bool:
        at_work[:] = [each.pid for each in read_heartbeats(folder / "out") if each.doing == "roll out"]
        return len(steps(folder)) >= 3 and len(joined(folder)) == 2 and bool(at_work)

    wait_until(waits, trainer)
    stopped, other = sorted(explorers, key=lambda each: each.pid not in at_work)
    assert send(stopped.pid, signal.SIGSTOP)
    return stopped, other


@pytest.mark.timeout(600)
def test_a_stopped_explorer_holds_up_nobody(servers: list[Forks], tmp_path: Path) -> None:
    """Its groups go to the other one, whatever it holds; when it goes on, it finds the run done."""
    (tmp_path / "quick.py").write_text(
        "from rollmill.remote import joined_explorers\njoined_explorers.HEALTH_S = 15.0\n"
    )
    stopped, other = stop_one(tmp_path, servers, after=3, steps=12, plugins=["quick.py"])
    with ExitStack() as stack:
        stack.callback(send, stopped.pid, signal.SIGCONT)
        release(tmp_path)
        fine(servers[0])
        fine(other)
    assert "the run is done" in fine(stopped)
    require_sound(tmp_path, 12, 1)


@pytest.mark.thorough
def test_the_error_names_the_stopped_explorer(servers: list[Forks], tmp_path: Path) -> None:
    limits = {"rollout": {"deadline_s": 20}, "explorer_silent_s": 120, "supervise": {"restarts": 0}}
    stopped, other = stop_one(tmp_path, servers, after=None, steps=10**6, **limits)
    pid = stopped.pid
    with ExitStack() as stack:
        stack.callback(send, pid)
        done = servers[0].wait()
        send(other.pid)
    assert done.code == 1
    assert "the orchestrator waited 20 s for explorers to finish their rollouts" in done.err
    assert f"(process {pid} on {socket.gethostname()}) is stopped; `kill -CONT {pid}` continues it" in done.err
    stopped.wait()
    other.wait()


def wait_until(happened: Callable[[], bool], server: Forks, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert not ended(server.pid), server.wait()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_explorers_the_trainer_says_how_to_start_one(servers: list[Forks], tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 2, "rollout": {"deadline_s": 1}})
    start(servers[0], tmp_path, "train")
    done = servers[0].wait()
    assert done.code == 1
    assert "the orchestrator waited 1 s for explorers to finish their rollouts" in done.err
    assert "No explorer has joined; start one: rollmill run out/config.yaml --set mode=explore --out out" in done.err


def test_an_explorer_whose_trainer_is_gone_ends(servers: list[Forks], tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 10**6})
    start(servers[0], tmp_path, "train")
    wait_until((tmp_path / "out/trainer.json").exists, servers[0])
    start(servers[1], tmp_path, "explore", "--set", "trainer_away_s=8")
    wait_until(lambda: len(steps(tmp_path)) >= 2, servers[0])
    send(servers[0].pid)
    servers[0].wait()
    done = servers[1].wait()
    assert done.code == 1
    assert "the explorer waited 8 s for the trainer (process" in done.err
    assert "rollmill resume out" in done.err


def test_an_explorer_whose_trainer_is_stopped_says_so(servers: list[Forks], tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 10**6, "supervise": {"restarts": 0}})  # the command is the trainer
    pid = start(servers[0], tmp_path, "train")
    wait_until((tmp_path / "out/trainer.json").exists, servers[0])
    start(servers[1], tmp_path, "explore", "--set", "trainer_away_s=8")
    wait_until(lambda: len(steps(tmp_path)) >= 2, servers[0])
    send(pid, signal.SIGSTOP)
    done = servers[1].wait()
    send(pid)
    servers[0].wait()
    assert done.code == 1
    assert f"the explorer waited 8 s for the trainer (process {pid} on {socket.gethostname()})." in done.err
    assert f"It is stopped; `kill -CONT {pid}` continues it." in done.err


def test_an_error_of_a_reward_ends_the_run_as_in_one_process(servers: list[Forks], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(task, completion):\n    raise ValueError('no good')\n")
    tiny_run(tmp_path, **RL | {"steps": 2, "rewards": [SLOW]})
    start(servers[0], tmp_path, "train")
    wait_until((tmp_path / "out/trainer.json").exists, servers[0])
    start(servers[1], tmp_path, "explore", "--set", "trainer_away_s=5")
    failed = servers[0].wait()
    assert failed.code == 1
    assert "no good" in failed.err
    done = servers[1].wait()
    assert done.code == 1
    assert "It ended: failed: " in done.err


def test_another_run_file_does_not_join(servers: list[Forks], tmp_path: Path) -> None:
    tiny_run(tmp_path, **RL | {"steps": 200})
    start(servers[0], tmp_path, "train")
    wait_until(lambda: (tmp_path / "out/trainer.json").exists(), servers[0])
    start(servers[1], tmp_path, "explore", "--set", "rollout.temperature=0.5")
    done = servers[1].wait()
    assert done.code == 2
    assert "run.yaml differs from the run in out in rollout.temperature" in done.err
    send(servers[0].pid)
    servers[0].wait()


def test_an_explorer_of_another_run_in_the_directory_ends(servers: list[Forks], tmp_path: Path) -> None:
    """The run before had no result yet, so that its directory could be used again."""
    (tmp_path / "mine.py").write_text(SLOW_REWARD.replace("0.03", "9"))
    tiny_run(tmp_path, **RL | {"steps": 200, "rewards": [SLOW | {"time_limit_s": 60}]})
    trainer, explorer, _ = servers
    start(trainer, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    wait_until(lambda: any(each.doing == "roll out" for each in read_heartbeats(tmp_path / "out")), trainer)
    send(trainer.pid)
    trainer.wait()
    start(trainer, tmp_path, "train")
    done = explorer.wait()
    assert done.code == 2
    assert "another run was started in out; start this explorer again to join it" in done.err
    send(trainer.pid)
    trainer.wait()


def test_training_alone_on_what_the_buffer_holds(servers: list[Forks], tmp_path: Path) -> None:
    """Offline: what one run has made is exported, and another one learns from it without any explorer."""
    tiny_run(tmp_path, **RL | {"steps": 3, "buffer": {"store": "sql"}})
    for argv in (
        ("run", "run.yaml", "--out", "made"),
        ("buffer", "export", "made", "--to", "made.parquet", "--kind", "usual"),
    ):
        assert servers[0].run(*argv, folder=tmp_path).code == 0
    start(servers[0], tmp_path, "train", "--set", "max_staleness=100")
    wait_until(lambda: (tmp_path / "out/trainer.json").exists(), servers[0])
    added = servers[1].run("buffer", "import", "out", "made.parquet", folder=tmp_path)
    assert added.code == 0, added.err
    fine(servers[0])
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3]


def test_an_explorer_is_interrupted_and_another_one_joins_late(servers: list[Forks], tmp_path: Path) -> None:
    paced_run(tmp_path, after=4, steps=10, max_staleness=1)
    trainer, explorer, other = servers
    start(trainer, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    wait_until(lambda: len(steps(tmp_path)) >= 2, trainer)
    assert send(explorer.pid, signal.SIGINT)
    assert explorer.wait().code == 130
    release(tmp_path)
    start(other, tmp_path, "explore")
    fine(trainer)
    assert "explorer 0: the run is done" in fine(other)
    require_sound(tmp_path, 10, 1)


def test_the_trainer_is_interrupted_and_resumed_with_the_same_explorer(servers: list[Forks], tmp_path: Path) -> None:
    paced_run(tmp_path, after=5, steps=10, max_staleness=2)
    trainer, explorer, _ = servers
    start(explorer, tmp_path, "explore")
    start(trainer, tmp_path, "train")
    wait_until(lambda: len(steps(tmp_path)) >= 3, trainer)
    assert send(trainer.pid, signal.SIGINT)
    assert trainer.wait().code == 130
    done = len(steps(tmp_path))
    assert (tmp_path / f"out/checkpoints/step-{done:06d}").is_dir()
    release(tmp_path)
    trainer.start("resume", "out", folder=tmp_path)
    fine(trainer)
    fine(explorer)
    require_sound(tmp_path, 10, 2)


def test_a_run_goes_on_though_its_weights_and_its_address_are_removed(servers: list[Forks], tmp_path: Path) -> None:
    """The trainer writes both again; until then its explorer goes on, and another one waits."""
    paced_run(tmp_path, after=3, steps=6, max_staleness=1)
    trainer, explorer, other = servers
    start(trainer, tmp_path, "train")
    start(explorer, tmp_path, "explore")
    wait_until(lambda: len(steps(tmp_path)) >= 2, trainer)
    shutil.rmtree(tmp_path / "out/weights", ignore_errors=True)
    address = tmp_path / "out/trainer.json"
    address.unlink()
    start(other, tmp_path, "explore")  # needs the weights, too
    wait_until(address.exists, trainer)
    release(tmp_path)
    fine(trainer)
    fine(explorer)
    fine(other)
    require_sound(tmp_path, 6, 1)


def test_oversampling_and_a_buffer_in_memory(servers: list[Forks], tmp_path: Path) -> None:
    changes = {"steps": 3, "rollout": {"oversample": 0.5}, "buffer": {"store": "memory"}}
    tiny_run(tmp_path, **RL | changes)
    start(servers[0], tmp_path, "train")
    start(servers[1], tmp_path, "explore")
    fine(servers[0])
    fine(servers[1])
    rows = steps(tmp_path)
    assert [row["rollout/stopped"] for row in rows] == [2.0, 2.0, 2.0]
    assert not (tmp_path / "out/buffer.sqlite").exists()
