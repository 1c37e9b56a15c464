"""One run file in six modes: synchronous, one step off-policy, explorers on Ray, and processes that share a folder.

Per seed, the quickstart's first stage makes a checkpoint that forgets most carries; its second stage repairs it, with
the same settings in every mode except `placement`, `mode` and `max_staleness`. All have to reach the same accuracy, and
none may train on rollouts beyond its max_staleness. Every run uses the command line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.harness import BenchError, Measured, need, note
from bench.learn import RUN_FILE, task_folder
from bench.report import Case, finish
from bench.worker import versions

RAY = {"name": "ray", "explorers": 1}
MODES: dict[str, dict[str, Any]] = {
    "inline, max_staleness 0": {"max_staleness": 0},
    "inline, max_staleness 1": {"max_staleness": 1},
    "ray, max_staleness 0": {"max_staleness": 0, "placement": RAY},
    "ray, max_staleness 1": {"max_staleness": 1, "placement": RAY},
    "ray, max_staleness 4": {"max_staleness": 4, "placement": RAY},
    "explore + train, max_staleness 2": {"max_staleness": 2, "buffer": {"store": "sql"}, "mode": "train"},
}
PEER = "inline, max_staleness 0"
KEY, DEADLINE_S = "accuracy", 900.0


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench modes", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--band", type=float, default=0.1, help="how far below the peer's accuracy a mode may end")
    args = parser.parse_args(arguments)
    need("ray", "pip install 'rollmill[ray]'")
    seeds = list(map(int, args.seeds.split(",")))
    measured = [Measured(mode, {}, [race(mode, seed, args.steps) for seed in seeds]) for mode in MODES]
    peer = measured[0]
    cases = [compare(one, peer, seeds) for one in measured[1:]]
    finish("modes", cases, versions=versions("torch", "transformers", "ray"), only_json=only_json, raw=measured)
    late = [one.name for one in measured if max(one.values("staleness")) > MODES[one.name]["max_staleness"]]
    if late:
        raise BenchError(f"staler than allowed: {', '.join(late)}")
    for one in measured:
        below = [mine < of_peer - args.band for mine, of_peer in zip(one.values(KEY), peer.values(KEY), strict=True)]
        if any(below):
            raise BenchError(f"{one.name}: more than {args.band} below {PEER}")


def race(mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Repair the checkpoint of a seed in one mode; returns accuracies, staleness and steps per second."""
    with tempfile.TemporaryDirectory(prefix="bench-modes-") as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(yaml.safe_dump(run_file(mode, seed, steps)))
        began, commands = time.perf_counter(), [("train", "both")]
        if MODES[mode].get("mode"):
            commands = [("train", "train"), ("explore", "explore")]
        running = {role: start(folder, role, chosen) for role, chosen in commands}
        try:
            for role, process in running.items():
                if process.wait(DEADLINE_S) != 0:
                    text = (folder / f"{role}.log").read_text()[-2000:]
                    raise BenchError(f"{mode}, seed {seed}: {role} failed:\n{text}")
        finally:
            for process in running.values():
                process.kill()
        seconds = time.perf_counter() - began
        found = result(folder / "out", seconds)
    note(f"  {mode}, seed {seed}: {found}")
    return found


def run_file(mode: str, seed: int, steps: int) -> dict[str, Any]:
    """The quickstart's second stage, from the checkpoint of a seed."""
    whole = yaml.safe_load(RUN_FILE.read_text())
    chosen = {key: value for key, value in MODES[mode].items() if key != "mode"}
    parts = {key: whole[key] for key in ("taskset", "rewards", "rollout", "evaluation")}
    model = {"path": str(task_folder(seed) / "model")}
    return {**parts, **whole["stages"][1], "name": "modes", "seed": seed, "model": model, "steps": steps, **chosen}


def start(folder: Path, role: str, mode: str) -> subprocess.Popen[bytes]:
    """Start one process of a run."""
    command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", "out"]
    command += [] if mode == "both" else ["--set", f"mode={mode}"]
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def result(run: Path, seconds: float) -> dict[str, Any]:
    """Read the result of a run."""
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = summary["evaluations"][-1]
    return {
        "before": summary["evaluations"][0]["eval/sampled"],
        KEY: last["eval/sampled"],
        "staleness": max(row["staleness/max"] for row in steps if "staleness/max" in row),
        "seconds": round(seconds, 1),
    }


def compare(one: Measured, peer: Measured, seeds: list[int]) -> Case:
    """Compare the final accuracy, seed by seed."""
    keys = ("before", "staleness", "seconds")
    extra = {"seeds": seeds, **{key: one.values(key) for key in keys}}
    return Case(one.name, peer.name, "sampled accuracy", one.values(KEY), peer.values(KEY), True, extra)
