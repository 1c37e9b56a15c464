"""Callbacks change a run while it trains, and what they change is repeated by resumed and replayed runs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.api_runs import SMALL, few_letters, weights

import rollmill
from rollmill.errors import CallbackError, ConfigError
from rollmill.orchestrator.interrupt import Interrupts
from rollmill.trackers.metrics_log import Metrics

SETTINGS: dict[str, Any] = SMALL | {"threads": 1, "steps": 6, "rewards": [few_letters, "exact"]}


class Tuner(rollmill.Callback):
    """Lowers the learning rate after step 2, weighs a reward less after step 3; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step(self, run: rollmill.RunControl, metrics: Metrics) -> None:
        self.calls.append(f"step {metrics['step']}")
        if run.step == 2:
            run.set_learning_rate(2e-4)
        if run.step == 3:
            run.set_reward_weight("few_letters", 0.25)

    def on_rollouts(self, run: rollmill.RunControl, experiences: Sequence[rollmill.Experience]) -> None:
        self.calls.append(f"rollouts {len(experiences)}")

    def on_checkpoint(self, run: rollmill.RunControl, folder: Path) -> None:
        self.calls.append(folder.name)


class Interrupter(rollmill.Callback):
    """Presses Ctrl-C after a step, and waits until the run has heard of it."""

    def __init__(self, step: int, heard: threading.Event) -> None:
        self.step, self.heard = step, heard

    def on_step(self, run: rollmill.RunControl, metrics: Metrics) -> None:
        if run.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
            assert self.heard.wait(60)


class StopAt(rollmill.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: rollmill.RunControl, metrics: Metrics) -> None:
        if run.step == self.step:
            run.stop()


def numbers(run: rollmill.TrainingRun) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in ("step", "lr", "reward/mean", "loss")) for row in run.metrics]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[rollmill.TrainingRun, Tuner]:
    tuner = Tuner()
    out = tmp_path_factory.mktemp("tuned") / "run"
    return rollmill.GRPO(**SETTINGS, callbacks=[tuner], out=out).train(), tuner


@pytest.mark.slow
def test_changes_hold_from_the_next_step_on(tuned: tuple[rollmill.TrainingRun, Tuner]) -> None:
    run, tuner = tuned
    assert [row["lr"] for row in run.metrics] == [1e-3] * 2 + [2e-4] * 4
    for row in run.metrics:
        weight = 1.0 if row["step"] <= 3 else 0.25
        assert row["reward/mean"] == pytest.approx(weight * row["reward/few_letters"] + row["reward/exact"])
    assert run.changes == [{"step": 2, "lr": 2e-4}, {"step": 3, "rewards": {"few_letters": 0.25}}]
    assert tuner.calls[:2] == ["rollouts 8", "step 1"]
    assert tuner.calls[-1] == "step-000006"


@pytest.mark.slow
def test_a_run_with_the_same_changes_is_the_same(tuned: tuple[rollmill.TrainingRun, Tuner], tmp_path: Path) -> None:
    run, _ = tuned
    replayed = rollmill.GRPO(**SETTINGS, changes=run.changes, out=tmp_path / "run").train()
    assert numbers(replayed) == numbers(run)
    assert weights(replayed.model_path) == weights(run.model_path)
    assert replayed.changes == []


@pytest.mark.slow
@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["script", "notebook"])
def test_an_interrupted_run_goes_on_bit_equal(
    tuned: tuple[rollmill.TrainingRun, Tuner], tmp_path: Path, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = tuned
    heard, request = threading.Event(), Interrupts.request

    def request_and_tell(self: Interrupts) -> bool:
        done = request(self)
        heard.set()
        return done

    monkeypatch.setattr(Interrupts, "request", request_and_tell)
    stopped = rollmill.GRPO(**SETTINGS, callbacks=[Tuner(), Interrupter(4, heard)], out=tmp_path / "run")

    async def cell() -> None:
        stopped.train()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if inside else stopped.train()
    assert stopped.model_path.name == "step-000004"
    resumed = rollmill.resume(tmp_path / "run")  # without the callbacks: the record says what they did
    assert numbers(resumed) == numbers(run)
    assert weights(resumed.model_path) == weights(run.model_path)


@pytest.mark.slow
def test_a_stop_ends_the_stage(tmp_path: Path) -> None:
    stages = [{"name": "first"}, {"name": "second", "steps": 2}]
    run = rollmill.GRPO(**SETTINGS, stages=stages, callbacks=[StopAt(1)], out=tmp_path / "run").train()
    assert [(row["step"], row["stage"]) for row in run.metrics] == [(1, "first"), (2, "second"), (3, "second")]
    assert run.changes == [{"step": 1, "stop": True}]


@pytest.mark.slow
def test_an_exception_of_a_callback_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    class Wrong(rollmill.Callback):
        def on_step(self, run: rollmill.RunControl, metrics: Metrics) -> None:
            run.set_reward_weight("few_leters", 0.0)

    run = rollmill.GRPO(**SETTINGS, callbacks=[Wrong()], out=tmp_path / "run")
    with pytest.raises(CallbackError, match=r"`Wrong.on_step` failed after step 1: no reward `few_leters`; there are"):
        run.train()
    assert run.model_path.name == "step-000001"


def test_wrong_changes_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"changes.0.rewards.other: no stage has such a reward"):
        rollmill.GRPO(**SETTINGS, changes=[{"step": 1, "rewards": {"other": 1.0}}], out=tmp_path / "run")
    with pytest.raises(ConfigError, match="give lr, rewards or stop"):
        rollmill.GRPO(**SETTINGS, changes=[{"step": 1}], out=tmp_path / "run")
    run = rollmill.GRPO(**SETTINGS, callbacks=[Tuner()], placement="ray", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="callbacks run in the process that trains"):
        run.train()


@pytest.mark.slow
@pytest.mark.thorough
def test_every_rank_changes_its_learning_rate(tmp_path: Path) -> None:
    changes = [{"step": 1, "lr": 2e-4}]
    one = rollmill.GRPO(**(SETTINGS | {"steps": 3}), changes=changes, out=tmp_path / "one").train()
    two = rollmill.GRPO(**(SETTINGS | {"steps": 3}), changes=changes, ranks=2, out=tmp_path / "two").train()
    assert [row["lr"] for row in two.metrics] == [1e-3, 2e-4, 2e-4]
    assert [row["loss"] for row in two.metrics] == pytest.approx([row["loss"] for row in one.metrics], abs=1e-5)
    assert [row["grad_norm"] for row in two.metrics] == pytest.approx(
        [row["grad_norm"] for row in one.metrics], rel=1e-3
    )
