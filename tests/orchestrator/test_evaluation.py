"""Evaluations of several sets: what is measured, beside which step, by which weights, and what is stored."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import GRPO, HELD_OUT, SFT, outcome, tiny_run

import rollmill
from rollmill.config.evaluation import EvaluationSet
from rollmill.config.loader import load_run
from rollmill.config.rollout import SamplingConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.errors import ConfigError, DeadlineError, RewardError
from rollmill.launch import evaluate, resume
from rollmill.orchestrator.evaluation import Evaluation
from rollmill.orchestrator.evaluation_set import SetEvaluator
from rollmill.rewards.grading import completion_from_text
from rollmill.rollout import Explorer
from rollmill.trackers import read_metrics
from rollmill.trackers.estimators import pass_at_k
from rollmill.trackers.rollout_log import decode_experience, encode_experience
from rollmill.trainer import Trainer
from rollmill.types import Experience, ParsedReply, Task, experience_from_completion

SETS = {
    "hard": {"taskset": HELD_OUT, "samples": 4, "k": [1, 3], "answer": "text", "greedy": False},
    "loose": {"taskset": HELD_OUT, "limit": 3, "rewards": [{"name": "format", "pattern": "1"}], "samples": 2},
}
EVALUATION = {"taskset": HELD_OUT, "every": 2, "sets": SETS}
FLOW = """
import rollmill

@rollmill.workflow
async def twice(task, policy, judge):
    first = await policy.complete(task.prompt, max_new_tokens=4)
    policy.step(0.0)
    second = await policy.complete(task.prompt, max_new_tokens=4)
    return await judge(second)
"""


def started(folder: Path, *overrides: str, **changes: Any) -> dict[str, Any]:
    return rollmill.run(tiny_run(folder, **changes), list(overrides), folder / "out")


def stored(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out/evaluations" / f"step-{step:06d}.json").read_text())
    return found


def experiences(folder: Path, step: int) -> list[Experience]:
    lines = (folder / "out/evaluations" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [decode_experience(json.loads(line)) for line in lines]


LOST = """
import os
from pathlib import Path

def even(task, completion):
    if Path(__file__).with_name("lost").exists():
        os._exit(1)
    return float(len(completion.token_ids) % 2 == 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "failed"),
    [pytest.param(100, 5, id="the last one"), pytest.param(2, 2, id="one alone between two steps")],
)
def test_an_evaluation_that_fails_costs_no_step_and_is_repeated(tmp_path: Path, every: int, failed: int) -> None:
    (tmp_path / "even.py").write_text(LOST)
    rewards = [{"name": "python", "function": f"{tmp_path}/even.py:even", "run_in": "process"}]
    path = tiny_run(
        tmp_path,
        stages=[GRPO | {"steps": 5}],
        evaluation={"every": every, "at_start": False, "rewards": rewards},
        early_stop={"metric": "eval/greedy", "patience": 9},
        checkpoint={"every": 100},
        supervise={"restarts": 0},
    )
    rollmill.run(path, out=tmp_path / "whole")
    (tmp_path / "lost").touch()
    with pytest.raises(RewardError, match="the python grader died twice"):
        rollmill.run(path, out=tmp_path / "out")
    checkpoint = tmp_path / f"out/checkpoints/step-{failed:06d}"
    assert checkpoint.is_dir()
    with pytest.raises(RewardError, match="the python grader died twice"):  # the step is not made again
        resume(tmp_path / "out")
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    (tmp_path / "lost").unlink()
    resume(tmp_path / "out")
    whole, resumed = outcome(tmp_path / "whole"), outcome(tmp_path / "out")
    assert resumed.pop("checkpoints") == sorted({checkpoint.name, *whole.pop("checkpoints")})
    lines = [{}, {}]
    for merged, side in zip(lines, (whole, resumed), strict=True):
        for line in side.pop("metrics"):
            merged.setdefault(line["step"], {}).update(line)
    assert lines[0] == lines[1]
    assert resumed == whole
    resume(tmp_path / "out")  # it is finished


@pytest.mark.slow
def test_an_evaluation_has_the_time_of_as_many_batches_as_it_is_large(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\n\ndef stuck(task, completion):\n    time.sleep(60)\n")
    rewards = [{"name": "python", "function": f"{tmp_path}/stuck.py:stuck"}]
    changes: dict[str, Any] = {
        "stages": [GRPO],
        "rollout": {"deadline_s": 1},
        "evaluation": {"rewards": rewards, "samples": 7},
        "early_stop": {"metric": "eval/greedy", "patience": 9},
        "supervise": {"restarts": 0},
    }
    with pytest.raises(DeadlineError, match="the evaluation waited 3 s for the explorer on 6 held-out tasks"):
        started(tmp_path, **changes)  # 6 greedy ones and 42 sampled ones: 3 batches of 16


def test_a_set_may_show_worked_examples_of_the_training_tasks(tmp_path: Path) -> None:
    few = {"taskset": HELD_OUT, "workflow": {"name": "few_shot", "count": 1}}
    started(tmp_path, evaluation={"taskset": None, "sets": {"few": few}}, stages=[GRPO | {"steps": 1}])
    found = experiences(tmp_path, 1)
    assert len(found) == HELD_OUT["options"]["size"]  # type: ignore[index]
    assert all(each.prompt.count("=") == 2 for each in found)


def test_every_set_is_measured_as_it_asks(tmp_path: Path) -> None:
    stages = [SFT | {"steps": 2}, GRPO | {"steps": 4}]
    summary = started(tmp_path, evaluation=EVALUATION, stages=stages, monitor={"report": True})
    rows = [row for row in read_metrics(tmp_path / "out") if any(key.startswith("eval/") for key in row)]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        found = stored(tmp_path, row["step"])
        assert found["metrics"] == {key: value for key, value in row.items() if key.startswith("eval/")}
        assert {"eval/greedy", "eval/sampled", "eval/hard/pass@3", "eval/hard/maj@3", "eval/loose/greedy"} <= row.keys()
        assert not {"eval/hard/greedy", "eval/loose/pass@1"} & row.keys()
        sets = {each["name"]: each for each in found["sets"]}
        assert [len(each["tasks"]) for each in sets.values()] == [6, 6, 3]
        counts = [task["correct"] for task in sets["hard"]["tasks"]]
        assert row["eval/hard/sampled"] == pytest.approx(np.mean(counts) / 4)
        assert row["eval/hard/pass@1"] == row["eval/hard/mean@4"] == row["eval/hard/sampled"]
        assert row["eval/hard/pass@3"] == pytest.approx(np.mean([pass_at_k(4, count, 3) for count in counts]))
        assert row["eval/hard/pass@3_low"] <= row["eval/hard/pass@3"] <= row["eval/hard/pass@3_high"]
        assert all(len(task["votes"]) == len(task["rewards"]) == 4 for task in sets["hard"]["tasks"])
    assert summary["accuracy_after"] == rows[-1]["eval/greedy"]
    page = (tmp_path / "out/report.html").read_text()
    assert all(text in page for text in ("<h2>Evaluation</h2>", "pass@k hard", "maj@k hard", "<b>loose</b>"))


def test_an_evaluation_beside_a_step_uses_the_weights_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens are there before the update, and it is begun with the step's own rollouts."""
    events: list[tuple[str, int]] = []
    roll, learn = Explorer.rollout, Trainer.step

    async def rollout(self: Explorer, task: Any, sampling: Any, **options: Any) -> list[Experience]:
        events.append((options["group"].partition("-")[0], -1))
        found = await roll(self, task, sampling, **options)
        return found

    def step(self: Trainer, batch: list[Experience], version: int, *probes: Any) -> dict[str, float]:
        events.append(("learn", version))
        return learn(self, batch, version, *probes)

    monkeypatch.setattr(Explorer, "rollout", rollout)
    monkeypatch.setattr(Trainer, "step", step)
    started(
        tmp_path, evaluation={"taskset": HELD_OUT, "every": 1}, stages=[GRPO | {"steps": 3}], checkpoint={"every": 1}
    )
    for version in range(4):
        found = experiences(tmp_path, version)
        assert len(found) == 6
        assert all((one.versions[one.action_mask] == version).all() for one in found)
    kinds = [kind for kind, _ in events]
    assert kinds == (["eval"] * 12 + ["repair"] * 4 + ["learn"]) * 3 + ["eval"] * 12


@pytest.mark.slow
def test_the_metrics_are_those_of_an_evaluation_alone(tmp_path: Path) -> None:
    started(
        tmp_path, evaluation=EVALUATION, stages=[SFT | {"steps": 2}, GRPO | {"steps": 4}], checkpoint={"keep_last": 9}
    )
    for step in (2, 4, 6):
        alone = evaluate(tmp_path / "out", step)
        assert {key: alone[key] for key in alone if key != "step"} == stored(tmp_path, step)["metrics"]


def test_with_early_stopping_the_verdict_comes_before_the_next_step(tmp_path: Path) -> None:
    stop = {"metric": "eval/hard/pass@3", "at_least": 0.0}
    changes: dict[str, Any] = {"evaluation": EVALUATION, "stages": [GRPO | {"steps": 6, "early_stop": stop}]}
    assert started(tmp_path, **changes)["steps"] == 2


@pytest.mark.slow
def test_the_best_checkpoint_by_a_metric_that_is_named(tmp_path: Path) -> None:
    keep = {"every": 100, "keep_last": 1, "keep_best": "eval/loose/sampled"}
    summary = started(tmp_path, evaluation=EVALUATION, stages=[GRPO | {"steps": 8}], checkpoint=keep)
    values = {each["step"]: each["eval/loose/sampled"] for each in summary["evaluations"]}
    best = max(values, key=lambda step: (values[step], -step))
    assert summary["best_step"] == best
    kept = sorted(int(path.name[5:]) for path in (tmp_path / "out/checkpoints").iterdir())
    assert kept == sorted({best, 8} - {0})


def test_without_keeping_the_best_rewards_may_come_after_the_update(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"evaluation": EVALUATION, "stages": [GRPO | {"steps": 4}]}
    started(tmp_path, "checkpoint.keep_best=false", **changes)
    assert [row["step"] for row in read_metrics(tmp_path / "out") if "eval/greedy" in row] == [0, 2, 4]


def test_a_rollout_of_several_experiences_is_one_attempt(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    sets = {"flow": {"taskset": HELD_OUT, "workflow": "twice", "samples": 3, "k": [2], "answer": "text"}}
    changes: dict[str, Any] = {"plugins": ["flow.py"], "stages": [GRPO | {"steps": 1}]}
    changes["evaluation"] = {"taskset": None, "sets": sets}
    started(tmp_path, **changes)
    [found] = stored(tmp_path, 1)["sets"]
    assert len(experiences(tmp_path, 1)) == 6 * 2  # greedy: two experiences a rollout
    for task in found["tasks"]:
        assert len(task["rewards"]) == len(task["votes"]) == 3
        assert len(task["greedy"]) == 1
        assert all(4 <= count <= 8 for count in task["tokens"] if count)


@pytest.mark.parametrize("place", ["auto", "boxed", "text"])
def test_votes_are_answers_without_reasoning(place: Any) -> None:
    replies = [
        ("<think>\\boxed{1}</think>\\boxed{42}", None),
        ("<think>\\boxed{42}", None),
        ("analysis\\boxed{7}final\\boxed{42}", ParsedReply("\\boxed{42}", "\\boxed{7}")),
    ]
    task = Task("t", [{"role": "user", "content": "6*7?"}], "42")
    completions = [replace(completion_from_text(task, text), reply=reply) for text, reply in replies]
    group = [
        experience_from_completion(each, id=f"g/{n}", task_id="t", group="g", prompt="6*7?", temperature=1.0)
        for n, each in enumerate(completions)
    ]
    group = [decode_experience(json.loads(json.dumps(encode_experience(each)))) for each in group]
    section = EvaluationSet(taskset=TasksetConfig(path=Path("x.jsonl")), samples=3, k=[2], answer=place, greedy=False)
    explorer: Any = None
    found, _ = SetEvaluator("", explorer, [task], section, SamplingConfig(), 0).result([group])
    one, cut, three = found.to_json()["tasks"][0]["votes"]
    assert one == three in ("42", "\\boxed{42}")
    assert cut is None


def test_a_resolved_run_file_with_sets_runs_as_it_did(tmp_path: Path) -> None:
    path = tiny_run(tmp_path, evaluation=EVALUATION, stages=[GRPO | {"steps": 1}])
    rollmill.run(path, [], tmp_path / "out")
    assert load_run(tmp_path / "out/config.yaml").stages == load_run(path).stages


@pytest.mark.slow
def test_an_interrupt_while_rewards_of_an_evaluation_are_awaited_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rewards come after the update: the step that was made counts, and the run ends as if nothing had happened."""
    changes: dict[str, Any] = {"evaluation": {"every": 1}, "stages": [GRPO | {"steps": 4}], "checkpoint": {"every": 9}}
    (tmp_path / "whole").mkdir()
    started(tmp_path / "whole", "checkpoint.keep_best=false", **changes)
    result, asked = Evaluation.result, []

    async def interrupted(self: Evaluation) -> Any:
        asked.append(self)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        return await result(self)

    (tmp_path / "stopped").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path / "stopped", "checkpoint.keep_best=false", **changes)
    resume(tmp_path / "stopped/out")
    whole, stopped = (outcome(tmp_path / each / "out") for each in ("whole", "stopped"))
    assert {**stopped, "checkpoints": None} == {**whole, "checkpoints": None}


AGAINST = """
import rollmill

@rollmill.workflow
async def against(task, policy, opponent, examples):
    mine = await policy.complete(task.prompt, max_new_tokens=6)
    theirs = await opponent.complete(task.prompt, max_new_tokens=6)
    return {"theirs": sum(map(ord, theirs.text)) / 1000, "examples": len(examples), "mine": 0.0 * len(mine.text)}
"""
DUEL = {"taskset": HELD_OUT, "workflow": "against", "samples": 2, "greedy": False}


@pytest.mark.slow
def test_a_set_has_the_opponent_that_the_stage_began_with(tmp_path: Path) -> None:
    """After resume as well, and with the stage's worked examples; the stage's own workflow need not take it."""
    (tmp_path / "flow.py").write_text(AGAINST)
    sharp = GRPO | {"steps": 4, "trainer": {"lr": 0.05}}
    changes: dict[str, Any] = {"plugins": ["flow.py"], "models": {"opponent": {"policy": "initial"}}}
    changes |= {"evaluation": {"every": 1, "sets": {"duel": DUEL}}, "checkpoint": {"every": 1, "keep_last": 9}}
    started(tmp_path, stages=[SFT | {"steps": 1}, sharp], **changes)
    before = [stored(tmp_path, step) for step in (4, 5)]
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / f"out/checkpoints/step-{step:06d}")
    resume(tmp_path / "out")
    assert [stored(tmp_path, step) for step in (4, 5)] == before
    duels = [one for one in experiences(tmp_path, 5) if one.group.startswith("eval-duel")]
    assert duels
    assert all(one.reward_parts["examples"] > 200 for one in duels)


def test_a_stage_with_another_frozen_opponent_is_evaluated_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(AGAINST)
    changes: dict[str, Any] = {"plugins": ["flow.py"], "models": {"opponent": {"policy": "initial"}}}
    changes |= {"evaluation": {"taskset": None, "sets": {"duel": DUEL}}}
    steps = {"steps": 2, "trainer": {"lr": 0.05}}
    summary = started(tmp_path, stages=[GRPO | steps, GRPO | steps | {"name": "second"}], **changes)
    ended, began = summary["evaluations"][1:3]
    assert (ended["step"], ended["stage"], began["step"], began["stage"]) == (2, "repair", 2, "second")
    assert ended["eval/duel/reward"] != began["eval/duel/reward"]


def test_what_happens_in_a_sets_own_tools_is_counted(tmp_path: Path) -> None:
    code = """
import rollmill

@rollmill.workflow
async def counts(task, policy, tools):
    await policy.complete(task.prompt, max_new_tokens=2)
    await tools.call("calculator", {"expression": "1 + 1"})
    return 1.0
"""
    (tmp_path / "flow.py").write_text(code)
    sets = {"own": {"taskset": HELD_OUT, "workflow": "counts", "greedy": False}}
    changes: dict[str, Any] = {"plugins": ["flow.py"], "tools": ["calculator"], "stages": [GRPO | {"steps": 2}]}
    started(tmp_path, evaluation={"taskset": None, "sets": sets}, **changes)
    [first, *_] = [row for row in read_metrics(tmp_path / "out") if "loss" in row]
    assert first["tools/calculator/calls"] == 6


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ("live_requests", "evaluation.sets.own.workflow: workflow `live_requests` waits for an application"),
        ("tools", "evaluation.sets.own.workflow: workflow `tools` calls tools; add some"),
        ("judged", "evaluation.sets.own.workflow.by: no model `scorer`"),
    ],
)
def test_a_workflow_of_held_out_tasks_that_lacks_something(tmp_path: Path, workflow: str, message: str) -> None:
    sets = {"own": {"taskset": HELD_OUT, "workflow": workflow}}
    with pytest.raises(ConfigError) as caught:
        load_run(tiny_run(tmp_path, evaluation={"taskset": None, "sets": sets}, stages=[GRPO]))
    assert message in str(caught.value)


def test_accuracy_in_the_summary_is_that_of_the_first_set(tmp_path: Path) -> None:
    sets = {"first": {"taskset": HELD_OUT, "greedy": False}, "second": {"taskset": HELD_OUT}}
    changes: dict[str, Any] = {"evaluation": {"taskset": None, "sets": sets}}
    summary = started(tmp_path, stages=[SFT | {"steps": 3}, GRPO | {"steps": 1}], **changes)
    last = summary["evaluations"][-1]
    assert summary["accuracy_after"] == last["eval/first/sampled"]
