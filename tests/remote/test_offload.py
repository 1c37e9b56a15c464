"""Explorers that hold nothing while the trainer works: whoever dies meanwhile, the run computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, forks, send
from support.tiny import outcome, tiny_run, trainer

from rollmill.trackers import read_metrics
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.trackers.step_timeline import read_step_timelines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GATED = """
import time
from pathlib import Path

import rollmill
import torch

HERE = Path(__file__).parent


@rollmill.advantage
def gated(rewards: torch.Tensor) -> torch.Tensor:
    '''Rewards less their mean, once the gate of this call is open.'''
    calls = len(list(HERE.glob("called-*"))) + 1
    (HERE / f"called-{calls}").touch()
    while (HERE / f"gate-{calls}").exists():
        time.sleep(0.02)
    return rewards - rewards.mean()
"""
RUN: dict[str, Any] = {
    "stages": None,
    "plugins": ["gated.py"],
    "algorithm": {"name": "grpo", "kl": 0.05, "advantage": "gated"},
    "rollout": {"batch": 1},  # so that what is decoded together does not depend on when requests arrive
    "trainer": {"lr": 1e-3},
    "steps": 5,
    "evaluation": None,
    "checkpoint": {"every": 1, "keep_last": 99},
}
OFFLOADED = {"engine": "destroyed", "policy": "disk", "optimizer": "disk", "reference": "disk"}
RAY = {"placement": {"name": "ray", "explorers": 1, "cpus": 0.5}}


@pytest.fixture(scope="module")
def explorers(server: Forks) -> Iterator[Forks]:
    """Starts explorers beside the trainer's `server`."""
    with ExitStack() as stack:
        yield stack.enter_context(forks())


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "gated.py").write_text(GATED)
    tiny_run(folder, **RUN | changes)
    return folder


def explorer_pid(out: Path) -> int:
    [found] = [each for each in read_heartbeats(out) if each.name == "explorer 0"]
    return found.pid


def doing(out: Path) -> str:
    return "".join(each.doing for each in read_heartbeats(out) if each.name == "explorer 0" and not each.ended)


def holds_nothing_again(out: Path, pid: int) -> bool:
    return explorer_pid(out) != pid and doing(out) == "hold nothing"


@pytest.mark.parametrize("place", ["processes", pytest.param("ray", marks=pytest.mark.thorough)])
def test_whoever_is_killed_while_explorers_hold_nothing(
    server: Forks, explorers: Forks, tmp_path: Path, place: str
) -> None:
    """The explorer dies in the second update, the trainer in the third. Weights, rollouts and metrics are bit for bit
    those of a run in one process without `offload`."""
    plain = written(tmp_path / "plain")
    done = server.run("run", "run.yaml", "--out", "out", folder=plain)
    assert done.code == 0, done.err

    changes = RAY if place == "ray" else {"mode": "train", "trainer_away_s": 60}
    folder = written(tmp_path / "split", offload=OFFLOADED, monitor={"timeline_every": 1}, **changes)
    out = folder / "out"
    for call in (2, 3):
        (folder / f"gate-{call}").touch()

    def explore() -> None:
        if place == "processes":
            explorers.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=folder)

    server.start("run", "run.yaml", "--out", "out", folder=folder)
    explore()
    for call, dies in ((2, explorer_pid), (3, trainer)):
        assert server.reaches((folder / f"called-{call}").exists), server.output()
        assert doing(out) == "hold nothing"
        pid = dies(out)
        assert send(pid)
        if dies is explorer_pid:
            if place == "processes":
                explorers.wait()
                explore()
            back = partial(holds_nothing_again, out, pid)
            assert server.reaches(back), server.output()
        (folder / f"gate-{call}").unlink()
    for each in (server, explorers)[: 1 + (place == "processes")]:
        done = each.wait()
        assert done.code == 0, done.err + done.out

    one, two = outcome(plain / "out"), outcome(out)
    for key in ("weights", "state", "generated", "rollouts", "checkpoints"):
        assert two[key] == one[key], key
    ours = ("memory/", "residency/", "explorer/")
    assert [{k: v for k, v in row.items() if not k.startswith(ours)} for row in two["metrics"]] == one["metrics"]
    assert all(row["residency/explorers/gb"] > 0 for row in read_metrics(out))
    for row in read_step_timelines(out).values():
        held = {kind for kind in row["bytes"] if "explorer 0" in kind}
        assert held == {"device/rollout/explorer 0 policy", "device/rollout/explorer 0 cache"}
        assert row["bytes"]["device/rollout/explorer 0 policy"] == row["bytes"]["device/train/policy"]


@pytest.mark.thorough
def test_reward_models_of_explorers_leave_with_them(server: Forks, explorers: Forks, tmp_path: Path) -> None:
    addition = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 9}}
    judge = {
        "algorithm": {"name": "reward_model", "batch": 4},
        "taskset": addition | {"fields": {"rejected": "answer"}},
        "steps": 1,
        "rollout": None,
        "rewards": None,
    }
    trained = written(tmp_path / "judge", **judge)
    done = server.run("run", "run.yaml", "--out", "out", folder=trained)
    assert done.code == 0, done.err
    rewards = [{"name": "model", "path": str(trained / "out/checkpoints/step-000001/reward_model")}]
    changes = {"rewards": rewards, "steps": 3, "mode": "train", "trainer_away_s": 60, "monitor": {"timeline_every": 1}}
    outs = []
    for name, offload in (("with", OFFLOADED | {"rewards": "disk"}), ("without", None)):
        folder = written(tmp_path / name, offload=offload, **changes)
        server.start("run", "run.yaml", "--out", "out", folder=folder)
        explorers.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=folder)
        for each in (server, explorers):
            done = each.wait()
            assert done.code == 0, done.err + done.out
        outs.append(folder / "out")
    assert outcome(outs[0])["weights"] == outcome(outs[1])["weights"]
    assert outcome(outs[0])["rollouts"] == outcome(outs[1])["rollouts"]
    for row in read_step_timelines(outs[0]).values():
        held = {kind for kind in row["bytes"] if kind.endswith("explorer 0 rewards")}
        assert held == {"device/rollout/explorer 0 rewards"}
