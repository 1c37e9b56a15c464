"""Runs whose explorers get weights by broadcast: they compute the same, and go on when explorers are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.forks import send
from support.tiny import metrics, ran, rolled_out

from rollmill.trackers.heartbeat import read_heartbeats

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRPO: dict[str, Any] = {"stages": None, "steps": 6, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}}
BROADCAST = {"name": "ray", "explorers": 2, "weights": "broadcast"}


def test_a_broadcast_brings_the_trainers_own_weights(tmp_path: Path) -> None:
    here = ran(GRPO, tmp_path, "here")
    broadcast = ran(GRPO, tmp_path, "broadcast", placement=BROADCAST | {"explorers": 1})
    assert len(rolled_out(broadcast)) > 50
    assert rolled_out(broadcast) == rolled_out(here)
    for key in ("loss", "grad_norm"):
        values = [[row[key] for row in metrics(run) if key in row] for run in (here, broadcast)]
        assert values[1] == pytest.approx(values[0], rel=1e-4, abs=1e-6)
    assert not (broadcast / "weights").exists()


class Killing:
    """A view that kills an explorer soon after each of some steps, the first one first."""

    def __init__(self, run: Path, seed: int, steps: Sequence[int]) -> None:
        self._run, self._random, self._steps = run, random.Random(seed), steps
        self.killed: list[str] = []

    def step(self, metrics: dict[str, Any], experiences: Sequence[Any]) -> None:
        if metrics["step"] in self._steps:
            time.sleep(self._random.uniform(0, 0.05))
            name = f"explorer {len(self.killed)}"
            [process] = [beat.pid for beat in read_heartbeats(self._run) if beat.name == name]
            if send(process, signal.SIGKILL):
                self.killed.append(name)

    def message(self, text: str) -> None: ...
    def start(self, *nothing: Any) -> None: ...
    def resume(self, *nothing: Any) -> None: ...
    def evaluation(self, *nothing: Any) -> None: ...
    def close(self) -> None: ...


@pytest.mark.thorough
def test_explorers_that_are_killed_while_weights_travel_are_replaced(tmp_path: Path) -> None:
    view = Killing(tmp_path / "run/out", 0, (1, 3))
    run = ran(GRPO, tmp_path, "run", view, placement=BROADCAST, max_staleness=2, steps=8, evaluation=None)
    assert view.killed == ["explorer 0", "explorer 1"]
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(row.get("explorer/replaced", 0) for row in rows) >= 1
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    ids = [one[0] for one in rolled_out(run)]
    assert len(ids) == len(set(ids)) == 8 * 4 * 4


LORA = {"rank": 4, "targets": ["q_proj", "v_proj"]}


@pytest.mark.thorough
def test_of_a_model_with_adapters_the_adapters_are_broadcast(tmp_path: Path) -> None:
    warm = ran(GRPO, tmp_path, "warm", steps=1)
    model = {"path": str(warm / "checkpoints" / os.listdir(warm / "checkpoints")[0]), "new": None, "lora": LORA}
    runs = [
        ran(GRPO, tmp_path, name, model=model, steps=3, placement=place)
        for name, place in (("here", "inline"), ("there", BROADCAST | {"explorers": 1}))
    ]
    assert rolled_out(runs[1]) == rolled_out(runs[0])
