"""What a run does besides learning: overlaps rewards with training, stops early, keeps checkpoints by policy."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_factory import experience
from support.tiny import GRPO, HELD_OUT, SFT, tiny_run

from rollmill.config.monitor import MonitorConfig
from rollmill.config.run import StageConfig
from rollmill.errors import DeadlineError, RewardError, TrainingError, is_recoverable
from rollmill.launch import run
from rollmill.orchestrator.interrupt import Interrupted, Interrupts
from rollmill.orchestrator.missing_verdicts import rewards_without_verdict
from rollmill.orchestrator.monitor import Monitor
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.stuck_run import StuckDetector
from rollmill.registry import import_file
from rollmill.trackers import read_metrics
from rollmill.trackers.event_log import STUCK, read_events
from rollmill.trackers.run_views import PlainView
from rollmill.trainer import Trainer
from rollmill.types import Experience

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}}


def started(folder: Path, **changes: Any) -> dict[str, Any]:
    return run(tiny_run(folder, **changes), out=folder / "out", view=PlainView(io.StringIO()))


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "out/checkpoints").iterdir())


OVERLAP = """
import threading
training, judged = threading.Event(), []
def mine(task, completion):
    if int(task.id.rpartition(":")[2]) >= 4:  # not of the first batch: only while the trainer works
        assert training.wait(30)
    judged.append(task.id)
    return float("1" in completion.text)
"""


def test_rewards_of_the_next_batch_are_judged_while_the_trainer_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OVERLAP)
    module: Any = import_file(tmp_path / "mine.py")
    train = Trainer.step
    during: list[int] = []

    def step(self: Trainer, experiences: list[Experience], version: int, *probes: Any) -> dict[str, float]:
        before = len(module.judged)
        module.training.set()
        enough = threading.Event()
        while len(module.judged) < min(before + 8, 32):
            enough.wait(0.01)
        during.append(len(module.judged) - before)
        module.training.clear()
        return train(self, experiences, version, *probes)

    monkeypatch.setattr(Trainer, "step", step)
    started(
        tmp_path,
        **RL,
        steps=4,
        max_staleness=1,
        rewards=[{"name": "python", "function": str(tmp_path / "mine.py") + ":mine", "run_in": "thread"}],
        rollout={"group_size": 2},
        taskset={"sampler": "sequential"},
        evaluation=None,
    )
    assert during == [8, 8, 8, 0]


SLOW = """
import time
def mine(task, completion):
    time.sleep(0.05)
    return float("1" in completion.text)
"""


@pytest.mark.slow
def test_inference_goes_on_while_rewards_are_awaited_and_the_report_shows_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    started(
        tmp_path,
        **RL | {"algorithm": {"name": "grpo", "kl": 0.1}},
        steps=2,
        rewards=[{"name": "python", "function": str(tmp_path / "mine.py") + ":mine", "processes": 1}],
        rollout={"group_size": 2},
        evaluation=None,
        monitor={"report": True},
    )
    [line] = [json.loads(line) for line in (tmp_path / "out/timeline.jsonl").read_text().splitlines()]
    assert (line["step"], line["stage"]) == (1, "train")
    spans = line["spans"]
    assert list(spans) == ["generate", "rollout", "inference", "reward/mine", "reward", "train"]
    [[_, began, ended]] = spans["inference"]
    assert sum(began < end for _, _, end in spans["reward/mine"]) >= 6  # of 8 judgements, one after the other
    assert spans["rollout"][0][2] <= began < ended <= spans["train"][0][1]
    assert spans["train"][0][2] <= line["seconds"] + 0.01
    rows = read_metrics(tmp_path / "out")
    assert all(row["judging/mine/seconds"] >= 0.05 and row["judging/mine/waiting"] >= 6 for row in rows)
    assert all(row["judging/mine/queued"] > row["judging/mine/seconds"] for row in rows)
    page = (tmp_path / "out/report.html").read_text()
    assert "Step 1 in time" in page
    assert page.count('class="waits"') >= 6


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "warned"), [(30, True), (0, False)])
def test_a_reward_that_is_mostly_too_slow_is_said_once(
    tmp_path: Path, seconds: int, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(SLOW.replace("0.05", str(seconds)))
    out = io.StringIO()
    reward = {"name": "python", "function": f"{tmp_path}/mine.py:mine", "time_limit_s": 0.1 if seconds else 30}
    changes: dict[str, Any] = RL | {"steps": 2, "rewards": [reward], "rollout": {"group_size": 2}, "evaluation": None}
    run(tiny_run(tmp_path, **changes), out=tmp_path / "out", view=PlainView(out))
    said = "8 of 8 judgements of reward `mine` took too long and earned its timeout_reward; raise its time_limit_s"
    assert out.getvalue().count(said) == warned


@pytest.mark.parametrize("steps_in_a_row", [2, 0])
def test_a_reward_that_stays_without_verdicts_ends_the_run(tmp_path: Path, steps_in_a_row: int) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio\nasync def mine(task, completion):\n    await asyncio.sleep(60)\n"
    )
    reward = {"name": "python", "function": f"{tmp_path}/mine.py:mine", "time_limit_s": 0.1}
    settings = {"missing_steps": steps_in_a_row}
    changes = RL | {"steps": 4, "rewards": [reward, {"name": "exact"}], "reward_settings": settings, "evaluation": None}
    path = tiny_run(tmp_path, **changes, checkpoint={"every": 1})
    if steps_in_a_row == 0:
        assert run(path, out=tmp_path / "out")["status"] == "done"
        return
    with pytest.raises(
        RewardError, match=r"`mine` took too long .* it was so in 2 steps in a row, which reward_settings\.miss"
    ):
        run(path, out=tmp_path / "out")
    assert [row["step"] for row in read_metrics(tmp_path / "out")] == [1, 2]
    assert checkpoints(tmp_path) == [1]  # a resumed run starts before the step that was one too many


@pytest.mark.parametrize(("reward", "missing"), [("code", False), ("math", True)])
def test_the_timeout_of_a_completions_own_program_is_a_verdict(reward: str, missing: bool) -> None:
    stage = StageConfig.model_validate({"steps": 1, "algorithm": {"name": "grpo"}, "rewards": [{"name": reward}]})
    rng = np.random.default_rng(0)
    batch = [experience(rng, "t", n, "1+1", "2", 0.0) for n in range(4)]
    for each, outcome in zip(batch, ["timeout", "timeout", "late", "ok"], strict=True):
        each.info["outcomes"] = {reward: outcome}
    assert bool(rewards_without_verdict(batch, stage)) is missing


def test_a_stage_stops_early_and_the_next_one_begins(tmp_path: Path) -> None:
    stop = {"metric": "eval/greedy", "at_least": 0.0}
    summary = started(tmp_path, stages=[SFT | {"early_stop": stop}, GRPO | {"steps": 3, "early_stop": {"patience": 1}}])
    rows = read_metrics(tmp_path / "out")
    assert [(row["step"], row["stage"]) for row in rows[1:]] == [
        (1, "warm"),
        (2, "warm"),
        (3, "warm"),
        (4, "repair"),
        (5, "repair"),
        (6, "repair"),
    ]
    assert summary["status"] == "done"
    assert summary["steps"] == 6


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_that_learns_nothing_says_so_once_and_may_stop(tmp_path: Path, stops: bool) -> None:
    out = io.StringIO()
    never = [{"name": "format", "pattern": "never written"}]
    monitor = {"stuck_after": 2, "stop_when_stuck": stops, "report": True}
    path = tiny_run(tmp_path, **RL, steps=5, rewards=never, evaluation=None, monitor=monitor)
    summary = run(path, out=tmp_path / "out", view=PlainView(out))
    assert summary["steps"] == (2 if stops else 5)
    assert checkpoints(tmp_path)[-1] == summary["steps"]
    said = "zero reward in 2 steps in a row of stage train"
    assert out.getvalue().count(said) == 1
    assert "WARNING at step 2" in out.getvalue()
    [event] = read_events(tmp_path / "out", STUCK)
    assert event["step"] == 2
    assert event["text"].startswith(said)
    assert ("The stage ends here" in event["text"]) is stops
    assert f"<b>Stuck:</b> step 2: {said}" in (tmp_path / "out/report.html").read_text()


STUCK_STEP = {"stage": "a", "reward/mean": 0.5, "reward/std": 0.1, "grad_norm": 1.0, "entropy": 1.0}


@pytest.mark.parametrize(
    ("shown", "symptom"),
    [
        ({}, None),
        ({"reward/mean": 0.0, "reward/std": 0.0, "grad_norm": 0.0, "entropy": 0.0}, "zero reward"),
        ({"reward/mean": 0.0}, None),  # rewards of both signs
        ({"grad_norm": 0.0}, "zero gradient"),
        ({"entropy": 0.009}, "collapsed entropy"),
        ({"reward/mean": 0.96, "grad_norm": 0.0, "entropy": 0.0}, None),  # nothing is left to learn
    ],
)
def test_symptoms_of_a_stuck_run(tmp_path: Path, shown: dict[str, float], symptom: str | None) -> None:
    stage = StageConfig.model_validate({"name": "a", "rewards": [{"name": "exact"}]})
    config, step = MonitorConfig(stuck_after=3), STUCK_STEP | shown
    monitor = Monitor(tmp_path, "run", [("a", 9)], config, PlainView(io.StringIO()))
    detector = StuckDetector([stage], config, monitor)
    assert detector.check(step) == detector.check(step) == []
    assert detector.check(STUCK_STEP) == []  # begins again
    resumed = StuckDetector([stage], config, monitor)
    resumed.replay([{"step": 0, "stage": "a", "eval/greedy": 0.1}, step, step])
    found = resumed.check(step)
    assert [text.partition(" in 3 steps in a row of stage a: ")[0] for text in found] == ([symptom] if symptom else [])
    assert resumed.check(step) == []


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [9]), (3, [6, 8, 9])])
def test_checkpoints_are_kept_by_policy(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    started(tmp_path, **RL, steps=9, evaluation=None, checkpoint={"every": 2, "keep_last": keep_last})
    assert checkpoints(tmp_path) == kept


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """Greedy accuracy under a reward that only the untrained model's answers get, so that step 0 or 2 is the best."""
    summary = started(
        tmp_path,
        **RL,
        steps=10,
        evaluation={"taskset": HELD_OUT, "every": 2, "samples": 2, "at_start": False},
        checkpoint={"every": 1, "keep_last": 1},
    )
    values = {record["step"]: record["eval/sampled"] for record in summary["evaluations"]}
    best = max(values, key=lambda step: (values[step], -step))
    assert summary["best_step"] == best
    assert checkpoints(tmp_path) == sorted({best, 10})
    assert summary["best_checkpoint"].endswith(f"step-{best:06d}")


def test_evaluations_are_stored(tmp_path: Path) -> None:
    started(tmp_path, **RL, steps=4, evaluation={"taskset": HELD_OUT, "every": 3})
    files = sorted(path.name for path in (tmp_path / "out/evaluations").iterdir())
    steps = ["step-000000", "step-000003", "step-000004"]
    assert files == [f"{step}.{kind}" for step in steps for kind in ("json", "jsonl")]
    rows = [json.loads(line) for line in (tmp_path / "out/evaluations" / files[-1]).read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [f"rows:{index}" for index in range(6)]
    assert all(row["reward"] is not None for row in rows)


def test_weights_of_no_step_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that has begun goes on after Ctrl-C, and may fail then: its weights belong to no step."""

    async def fails_after_ctrl_c(stage: Stage, *_: object) -> None:
        stage.updating = True
        raise Interrupted from TrainingError("not finite")

    monkeypatch.setattr("rollmill.orchestrator.orchestrator.train", fails_after_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path, **RL, evaluation=None)
    assert not (tmp_path / "out/checkpoints").exists()


def test_guarded_work_that_fails_after_an_interrupt_names_its_error() -> None:
    asyncio.run(_guarded())


async def _guarded() -> None:
    interrupts = Interrupts()

    async def cannot_be_cancelled() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise TrainingError("not finite")

    with interrupts.installed():
        interrupts.request()
        interrupts.requested = False  # it comes while the work is under way
        with pytest.raises(Interrupted) as caught:
            await interrupts.guard(cannot_be_cancelled())
    assert isinstance(caught.value.__cause__, TrainingError)


def test_a_step_without_records_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation beside a step may fail once the step is made: its number would be that of the step before."""

    async def fails_beside_a_step(stage: Stage, *_: object) -> None:
        stage.state.step += 1
        raise error

    error = DeadlineError("the evaluation", "the explorer", 1.0, "Wait longer.")
    assert is_recoverable(error)
    monkeypatch.setattr("rollmill.orchestrator.orchestrator.train", fails_beside_a_step)
    with pytest.raises(DeadlineError):
        started(tmp_path, **RL, evaluation=None)
    assert not (tmp_path / "out/checkpoints").exists()
