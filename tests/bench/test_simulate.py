"""`bench simulate` and `bench plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench_command import bench

from bench.simulate import predictions, simulated, training

COSTS: dict[str, Any] = {
    "passes": {"step": 0.0, "token": 1e-4, "attended": 0.0, "prompt": 0.0},
    "train_s": {"2": [0.3, 0.3], "8": [0.9, 0.9]},
    **dict.fromkeys(("group_s", "judge_s", "publish_s", "take_s", "again_s"), 0.0),
}


def test_training_of_other_batches_and_ranks() -> None:
    assert training(COSTS, 8, 1) == [0.9, 0.9]
    assert training(COSTS, 32, 1) == pytest.approx([3.3, 3.3])
    assert training(COSTS, 32, 4) == pytest.approx([0.9, 0.9])
    assert training(COSTS | {"publish_s": 0.1}, 32, 4) == pytest.approx([1.1, 1.1])


def test_rates_follow_from_costs() -> None:
    rollout = 8 * 8 * 96 * 1e-4
    assert simulated(COSTS, 1, 0, 8, 96) == pytest.approx(1 / (rollout + 0.9))
    assert simulated(COSTS, 1, 4, 8, 96) == pytest.approx(1 / 0.9, rel=0.02)


def test_a_table_of_workers() -> None:
    rows = predictions([COSTS], [2, 8], [0, 1], 8, 96)
    assert [(row["workers"], row["max_staleness"]) for row in rows] == [(2, 0), (2, 1), (8, 0), (8, 1)]
    assert rows[2]["steps_per_s"] >= rows[0]["steps_per_s"]
    assert rows[3]["larger_batch"]["groups"] == 32
    assert 1 <= rows[3]["larger_batch"]["trainer_ranks"] < 8


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plan_against_a_run(tmp_path: Path) -> None:
    bench(str(tmp_path), "plan", "--rounds", "1", "--runs", "minimal", "--processor-time")
    [case] = json.loads((tmp_path / "plan.json").read_text())["cases"]
    memory = {name: value for name, value in case["checked"].items() if name.startswith("memory/")}
    assert len(memory) == 3
    assert all(abs(each["off_by"]) <= 0.25 for each in memory.values())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_measured_and_simulated(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    sizes = ("--model", "tiny", "--prompts", "4", "--new-tokens", "16", "--rounds", "1", "--steps", "2")
    options = ("--staleness", "1", "--workers", "2,8", "--settle", "3", "--warmups", "0")
    line = bench(str(tmp_path), "simulate", *sizes, *options)
    assert (line["peer_name"], line["unit"]) == ("measured", "steps/s")
    [case] = json.loads((tmp_path / "simulate.json").read_text())["cases"]
    assert [row["workers"] for row in case["predicted"]] == [2, 8]
    assert case["staleness_measured"] <= 1
