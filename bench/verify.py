"""A reward that is wrong in 20 % of cases, with and without an operator that verifies it by an independent rule.

Per seed, one warm-started checkpoint of the quickstart (as in `learn`) is trained with GRPO on the same tasks: with the
wrong reward alone, with the wrong reward and the operator `verify`, and with the right reward. Whether the reward is
wrong is a fixed function of task and completion. Accuracy is that of sampled completions on 500 held-out sums, by the
right rule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.curves import Curve, svg
from bench.harness import ROOT, BenchError, Measured, import_path, note
from bench.learn import task_folder
from bench.report import Case, finish

Points = list[tuple[float, float]]
EVERY, BATCH, GROUP = 5, 16, 8
REWARD = ROOT / "bench" / "ours" / "wrong_reward.py"
RIGHT = {"name": "exact", "after": "#"}
WRONG = {"name": "python", "function": f"{REWARD}:wrong_in_a_fifth", "run_in": "thread"}
SIDES: dict[str, dict[str, Any]] = {
    "verified": {
        "rewards": [WRONG, RIGHT | {"weight": 0}],
        "pipeline": [{"name": "verify", "rewards": [RIGHT]}],
    },
    "not verified": {"rewards": [WRONG, RIGHT | {"weight": 0}]},
    "right reward": {"rewards": [RIGHT]},
}
IMAGE = ROOT / "docs" / "images" / "verify.svg"


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench verify", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--svg", type=Path, default=IMAGE)
    args = parser.parse_args(arguments)
    curves: dict[str, list[Points]] = {name: [] for name in SIDES}
    raw: list[Measured] = []
    for seed in map(int, args.seeds.split(",")):
        folder = task_folder(seed)
        for name, changes in SIDES.items():
            curve = trained(folder, seed, args.steps, args.held_out, changes)
            note(f"  seed {seed}, {name}: {curve}")
            curves[name].append(curve)
            raw.append(Measured(f"{name} seed {seed}", {}, [{"rollouts": x, "accuracy": y} for x, y in curve]))
    args.svg.write_text(chart(curves))
    verified, alone, right = curves.values()
    extra = {"right": [round(wrong_share(curve), 4) for curve in right]}
    mean = Case(
        "mean share of wrong answers while training",
        "not verified",
        "share",
        [wrong_share(curve) for curve in verified],
        [wrong_share(curve) for curve in alone],
        False,
        extra,
    )
    last = Case(
        "share of wrong answers at the end",
        "not verified",
        "share",
        [1 - curve[-1][1] for curve in verified],
        [1 - curve[-1][1] for curve in alone],
        False,
    )
    finish("verify", [mean, last], headline=[mean], versions={}, only_json=only_json, raw=raw)


def chart(curves: dict[str, list[Points]]) -> str:
    """Draw the accuracies of all runs as SVG, verified ones on top."""
    numbered = [(number, name) for number, name in enumerate(curves)]
    lines = [Curve(name, number, each) for number, name in reversed(numbered) for each in curves[name]]
    return svg("completions rolled out", "accuracy of sampled completions", lines)


def wrong_share(curve: Points) -> float:
    """Mean share of wrong answers over all evaluations after the first."""
    return statistics.mean(1 - accuracy for _, accuracy in curve[1:])


def trained(folder: Path, seed: int, steps: int, held_out: int, changes: dict[str, Any]) -> Points:
    """Train one run; returns (completions rolled out, accuracy by the right rule) at every evaluation."""
    run = {
        "seed": seed,
        "model": {"path": str(folder / "model")},
        "taskset": {"path": str(folder / "train.jsonl")},
        "rollout": {"batch": BATCH, "group_size": GROUP, "max_new_tokens": 40},
        "algorithm": {"name": "grpo"},
        "trainer": {"lr": 1e-4},
        "steps": steps,
        "evaluation": {
            "taskset": {"path": str(folder / "held_out.jsonl")},
            "limit": held_out,
            "every": EVERY,
            "greedy": False,
            "samples": 1,
        },
        "checkpoint": {"every": steps},
        **changes,
    }
    with tempfile.TemporaryDirectory(prefix="bench-verify-") as name:
        place = Path(name)
        (place / "run.yaml").write_text(yaml.safe_dump(run))
        done = subprocess.run(
            [sys.executable, "-m", "rollmill", "run", str(place / "run.yaml"), "--out", str(place / "out")],
            env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BenchError(f"the run failed:\n{done.stderr[-2000:]}")
        files = sorted((place / "out/evaluations").glob("*.jsonl"))
        return [(_step(file) * BATCH * GROUP, _accuracy(file)) for file in files]


def _step(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def _accuracy(file: Path) -> float:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return float(statistics.mean(row["reward_parts"]["exact"] for row in rows))
