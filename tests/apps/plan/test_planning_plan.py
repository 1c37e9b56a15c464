"""Plans of real run files against runs of them. Memory is compared; time is not (`python -m bench plan` does that)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run

from rollmill.apps.plan.command import print_plan
from rollmill.apps.plan.planning.calibration import Calibration, calibrate
from rollmill.apps.plan.planning.measurement import MIN_STEPS
from rollmill.apps.plan.planning.planner import MachineSpec, plan_stage
from rollmill.apps.plan.planning.prediction import StepTimeModel, predict_step
from rollmill.apps.plan.planning.rollouts import draw_groups
from rollmill.apps.plan.planning.simulation import choose_split, simulation_costs
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.orchestrator.stage_memory import PhaseMemory, too_large
from rollmill.trackers import read_metrics

GRPO: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo", "kl": 0.1},
    "steps": 4,
    "evaluation": None,
    "rollout": {"batch": 8, "max_new_tokens": 24},
    "threads": 1,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("plan")
    [calibration] = calibrate(load_run(tiny_run(folder, **GRPO)), folder, max_tokens=16)
    return calibration


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


def test_what_is_measured(found: Calibration) -> None:
    assert {sample.groups for sample in found.samples} == {1, 2, 4}
    assert found.longest == 16
    for sample in found.samples:
        assert len(sample.lengths) == sample.groups == len(sample.prompts)
        assert sum(map(sum, sample.lengths)) == sample.generated == sum(each.tokens for each in sample.passes)
        assert sample.trained == sum(sample.prompts) + sample.generated
        assert set(sample.memory) == {"rollout", "inference", "train"}


def test_predictions_are_finite_and_sensible(found: Calibration) -> None:
    plan = plan_stage(found, MachineSpec(4, 64e9))
    assert all(math.isfinite(each) and each >= 0 for each in numbers(plan.to_json()))
    step = plan.prediction
    assert (step.groups, step.completions) == (8, 32)
    assert 0 < step.mean_tokens <= step.max_tokens <= 24
    assert step.seconds["total"] == pytest.approx(sum(step.seconds.values()) - step.seconds["total"])
    assert step.tokens_per_second < (step.decode_tokens_per_second or 0)
    half = replace(found, stage=found.stage.model_copy(deep=True))
    half.stage.rollout.batch = 4
    less = predict_step(StepTimeModel(half))
    assert less.seconds["rollout"] <= step.seconds["rollout"]
    assert less.seconds["train"] <= step.seconds["train"]
    for phase, memory in plan.memory.items():
        assert plan.least[phase].total <= memory.total
    assert plan.too_large == []


def with_known_memory(found: Calibration, constant: float, per_token: float) -> Calibration:
    """Calibration whose training steps took this much above its components: what a process really takes is noisy."""
    present, gradients, between = found.present["train"], found.sizes["gradients"], 1e8
    samples = [
        replace(
            sample,
            idle=present - gradients + sample.cache_bytes + between,
            memory={
                **sample.memory,
                "train": present + sample.cache_bytes + between + constant + per_token * sample.trained,
            },
        )
        for sample in found.samples
    ]
    return replace(found, samples=samples)


def test_memory_by_rank_and_process(found: Calibration) -> None:
    found = with_known_memory(found, constant=1e6, per_token=2e3)
    plan, whole = plan_stage(found, MachineSpec(4, 64e9)), found.sizes["policy"]
    ranks = plan.ranks
    first, other = (ranks[f"2 ranks, sharding fsdp, {which}"].parts for which in ("first", "others"))
    assert (first["policy"], other["policy"]) == (1.5 * whole, 0.5 * whole)
    assert other["optimizer"] == found.sizes["optimizer"] / 2
    assert ranks["2 ranks, sharding none, others"].parts["policy"] == whole
    shared, alone = ranks["2 ranks, sharding context, first"].parts, ranks["1 rank"].parts
    assert {**shared, "work": 0} == {**alone, "work": 0}
    assert shared["work"] - 1e6 == pytest.approx((alone["work"] - 1e6) / 2)
    assert "optimizer" not in plan.processes["explorer"].parts
    assert "cache" not in plan.processes["trainer"].parts


def test_with_offload_rollouts_need_the_policy_unless_there_is_a_cast_of_all_of_it(found: Calibration) -> None:
    merged = replace(found, sizes=found.sizes | {"cast": found.sizes["policy"] // 2})  # adapters, in fp32
    for precision, needed in (("fp32", {"policy", "cast"}), ("bf16", {"cast"})):
        least = plan_stage(replace(merged, precision=precision), MachineSpec(4, 64e9)).least["rollout"]
        assert set(least.parts) & {"policy", "cast", "optimizer"} == needed


GAME = """
import rollmill

@rollmill.workflow
async def game(task, policy, opponent):
    mine = await policy.complete(task.prompt, max_new_tokens=4)
    theirs = await opponent.complete(task.prompt, max_new_tokens=4)
    return float(mine.text > theirs.text)
"""


@pytest.mark.slow
def test_past_copies_of_the_policy_take_memory_in_every_phase(tmp_path: Path) -> None:
    """As many as the run has in the end; the measurement has one, which does not count twice."""
    (tmp_path / "flow.py").write_text(GAME)
    flow = {"plugins": ["flow.py"], "workflow": "game", "rewards": None, "rollout": {"batch": 1}}
    models = {"opponent": {"policy": "past", "every": 2, "keep": 5}}
    run = tiny_run(tmp_path, **GRPO | flow | {"models": models})
    [found] = calibrate(load_run(run), tmp_path / "one", max_tokens=4)
    each = found.sizes["policy"] + found.sizes.get("cast", 0)
    assert found.sizes["past_copies"] == 3 * each  # after 0, 2 and 4 of 4 steps
    plan = plan_stage(found, MachineSpec(1, 64e9))
    for phase in ("rollout", "inference", "train"):
        assert plan.memory[phase].parts["past_copies"] == plan.least[phase].parts["past_copies"] == 3 * each
    sizes = {name: size for name, size in found.sizes.items() if name != "past_copies"}
    present = {phase: size - each for phase, size in found.present.items()}
    unaware = plan_stage(replace(found, sizes=sizes, present=present), MachineSpec(1, 64e9))
    for phase, memory in unaware.memory.items():
        assert plan.memory[phase].total == pytest.approx(memory.total + 2 * each)


def with_fixed_times(found: Calibration) -> Calibration:
    """The first samples of each size, as if work took the same on any machine."""
    samples = []
    for size in sorted({sample.groups for sample in found.samples}):
        for sample in [each for each in found.samples if each.groups == size][:MIN_STEPS]:
            passes = [replace(each, seconds=1e-3 + 1e-4 * each.tokens + 1e-5 * each.prompt) for each in sample.passes]
            rollout = sum(each.seconds for each in passes) + 1e-3 * size
            seconds = {"rollout": rollout, "inference": 2e-5 * sample.trained, "train": 6e-5 * sample.trained}
            seconds["total"] = sum(seconds.values()) + 1e-3
            samples.append(replace(sample, passes=passes, seconds=seconds, full_s=seconds["train"]))
    return replace(found, samples=samples, publish_s=1e-3, receive_s=1e-3)


def test_splits(found: Calibration) -> None:
    found = with_fixed_times(found)
    plan = plan_stage(found, MachineSpec(4, 64e9))
    assert {split.explorers for split in plan.splits} == {0, 1, 2, 3}
    at = {(split.explorers, split.max_staleness): split.step_s for split in plan.splits}
    assert at[3, 0] <= 1.05 * at[1, 0]
    assert at[1, 1] <= 1.05 * at[1, 0]
    least = min(split.step_s for split in plan.splits if split.max_staleness <= 1)
    assert plan.best.step_s <= 1.02 * least
    assert choose_split(plan.splits, 0).max_staleness == 0
    assert {split.explorers for split in plan_stage(found, MachineSpec(1, 64e9)).splits} == {0}
    assert {split.explorers for split in plan_stage(found, MachineSpec(4, 1e9)).splits} == {0}  # no room for two


def test_processes_take_as_many_cores_as_the_one_that_was_measured(found: Calibration) -> None:
    plan = plan_stage(replace(found, threads=2), MachineSpec(5, 64e9))
    assert {split.explorers for split in plan.splits} == {0, 1}


def test_on_gpus_each_process_has_one(found: Calibration, capsys: pytest.CaptureFixture[str]) -> None:
    on_gpus = replace(found, device=torch.device("cuda"), threads=8)
    apart = plan_stage(on_gpus, MachineSpec(3, 64e9)).processes
    largest = max(memory.total for memory in apart.values())
    plan = plan_stage(on_gpus, MachineSpec(3, 1.01 * largest))  # not enough for two processes together
    assert {split.explorers for split in plan.splits} == {0, 1, 2}
    assert {split.explorers for split in plan_stage(on_gpus, MachineSpec(3, 0.99 * largest)).splits} == {0}
    print_plan(replace(plan, best=next(split for split in plan.splits if split.explorers == 2)))
    printed = capsys.readouterr().out
    assert "each process on a GPU of its own" in printed
    assert "placement: {name: ray, explorers: 2, gpus: 1, trainer_gpus: 1}" in printed


def test_what_passes_do_not_take_is_not_counted_again_for_groups_that_were_dropped(found: Calibration) -> None:
    model = StepTimeModel(found)
    usual, prediction = simulation_costs(model, predict_step(model)), predict_step(model)
    model.refill = 3.0
    more = simulation_costs(model, prediction)
    assert model.passes is not None
    assert more.pass_s == pytest.approx(3 * usual.pass_s)
    around = model.overhead_s(prediction.groups) / prediction.groups
    assert more.group_s - around == pytest.approx(3 * (usual.group_s - around), abs=1e-12)


def test_completions_that_were_cut_go_on(found: Calibration) -> None:
    lengths = [length for group in draw_groups(found, 200, 0) for length in group.lengths]
    assert max(lengths) <= 24
    assert any(length > 16 for length in lengths)
    assert sum(length < 16 for length in lengths) > 0


def test_what_does_not_fit_names_keys(found: Calibration) -> None:
    stage = found.stage
    memory = {
        "rollout": PhaseMemory({"policy": 1e9, "cache": 8e9, "process": 1e9}),
        "train": PhaseMemory({"policy": 1e9, "optimizer": 4e9, "reference": 3e9, "work": 1e9, "process": 1e9}),
    }
    least = {"rollout": memory["rollout"], "train": PhaseMemory({"policy": 1e9, "optimizer": 4e9, "work": 1e9})}
    rollout, train = too_large(stage, memory, least, 7e9)
    assert "phase `rollout` takes 10 GB of 7 GB (cache 8" in rollout
    assert "rollout.max_sequences (256)" in rollout
    assert "offload: {budget_gb: 7} leaves 6 GB" in train
    assert "trainer.sharding: fsdp" in train
    assert list(too_large(stage, memory, least, 11e9)) == []
    ranked = stage.model_copy(deep=True)
    ranked.trainer.ranks, ranked.trainer.sharding = 2, "fsdp"  # which does not offload
    assert "offload" not in "".join(too_large(ranked, memory, least, 7e9))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_run(tmp_path, **GRPO | {"steps": 2, "rollout": {"batch": 2}}))
    assert main(["plan", path, "--json", "--cores", "2"]) == 0
    [stage] = json.loads(capsys.readouterr().out)["stages"]
    assert stage["step"]["completions"] == 8
    assert {"rollout", "inference", "train"} == set(stage["memory"])
    assert main(["plan", path, "--memory-gb", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "s a step" in printed
    assert "does not fit: stage train: phase `rollout` takes" in printed
    assert main(["plan", path, "--set", "engine=vllm"]) == 2
    assert "--set engine=native" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"steps": 5}, id="grpo", marks=pytest.mark.thorough),
        pytest.param(
            {"steps": 5, "algorithm": {"name": "ppo", "kl": 0.1}, "rollout": {"batch": 16, "max_new_tokens": 24}},
            id="ppo",
        ),
        pytest.param(
            {"steps": 5, "model": {"new": {"hidden_size": 512, "layers": 4, "intermediate_size": 2048, "heads": 8}}},
            id="larger",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_memory_is_that_of_a_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tiny_run(tmp_path, **GRPO | changes | {"offload": {"budget_gb": 1000}})
    command = [sys.executable, "-m", "rollmill"]  # processes of their own, whose memory nobody else has used
    subprocess.run([*command, "run", path, "--out", tmp_path / "out", "--json"], check=True, capture_output=True)
    planned = subprocess.run([*command, "plan", path, "--json"], check=True, capture_output=True)
    [stage] = json.loads(planned.stdout)["stages"]
    rows = read_metrics(tmp_path / "out")[2:]
    for phase, memory in stage["memory"].items():
        measured = max(row[f"memory/{phase}"] for row in rows)
        assert memory["total"] / 1e9 == pytest.approx(measured, rel=0.25), phase
