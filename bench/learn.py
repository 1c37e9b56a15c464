"""Seconds and tokens to a sampled accuracy of .92 on the quickstart's carry-repair task: ours against TRL.

Per seed, the quickstart's first stage makes a warm-started checkpoint; both sides repair it with the settings of the
second (same tasks, batch, group size, learning rate, optimizer and reward). Every 5 steps both are evaluated on the
same 500 held-out sums; time and tokens of evaluations do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bench.harness import ROOT, BenchError, Measured, Side, Worker, import_path, need, note
from bench.models import cache_dir
from bench.report import Case, finish
from bench.step import TRL_HOW

RUN_FILE = ROOT / "src" / "rollmill" / "quickstart" / "addition.yaml"
ADDITION = RUN_FILE.with_suffix(".py")
TARGET, EVERY, HELD_OUT = 0.92, 5, 2000


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench learn", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--target", type=float, default=TARGET)
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    reached: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    raw: list[Measured] = []
    for seed in map(int, args.seeds.split(",")):
        for one in race(seed, args.max_steps, args.target):
            raw.append(one)
            side = one.name.split()[0]
            reached[side].append(cost(one, args.target, seed))
    extra = {"steps": {side: [one["steps"] for one in runs] for side, runs in reached.items()}}
    cases = []
    for unit, key in (("s", "seconds"), ("tokens", "tokens")):
        ours, peer = ([one[key] for one in reached[side]] for side in ("ours", "trl"))
        cases.append(Case(f"{unit} to {args.target:.0%} sampled", "trl", unit, ours, peer, False, extra))
    versions = {one.name: one.ready["versions"] for one in raw[:2]}
    finish("learn", cases, headline=cases[:1], versions=versions, only_json=only_json, raw=raw)


def race(seed: int, max_steps: int, target: float) -> list[Measured]:
    """Run both sides in turn, `EVERY` steps at a time, until each has reached the target or `max_steps`."""
    folder = task_folder(seed)
    common = ("--folder", str(folder), "--seed", str(seed), "--every", str(EVERY))
    workers: list[Worker] = []
    try:
        for name, module in (("ours", "bench.ours.learn"), ("trl", "bench.peers.trl_learn")):
            workers.append(Worker(Side(f"{name} seed {seed}", module, common)))
        measured = [Measured(worker.side.name, worker.ready, []) for worker in workers]
        for _ in range(max_steps // EVERY):
            for worker, one in zip(workers, measured, strict=True):
                if not one.rounds or one.rounds[-1]["accuracy"] < target:
                    one.rounds.append(worker.run())
                    note(f"  {one.name}: {one.rounds[-1]}")
        return measured
    finally:
        for worker in workers:
            worker.close()


def cost(one: Measured, target: float, seed: int) -> dict[str, Any]:
    """Training seconds, generated tokens and steps until the target. Raises BenchError if it was not reached."""
    accuracies = one.values("accuracy")
    if accuracies[-1] < target:
        raise BenchError(f"{one.name} did not reach {target} in {len(accuracies) * EVERY} steps: {accuracies}")
    return {
        "seconds": sum(one.values("seconds")),
        "tokens": sum(one.values("tokens")),
        "steps": len(accuracies) * EVERY,
    }


def task_folder(seed: int) -> Path:
    """A folder with `model` (the warm start), train.jsonl, held_out.jsonl and settings.json; created if absent."""
    from rollmill.config.loader import load_run
    from rollmill.quickstart.addition import rows

    text = RUN_FILE.read_text()
    folder = cache_dir() / f"learn-{_key(text)}-{seed}"
    if (folder / "settings.json").exists():
        return folder
    whole = yaml.safe_load(text)
    warm_start = {key: whole[key] for key in ("model", "taskset")} | whole["stages"][0]
    warm_start.pop("evaluation", None)
    _train(folder, warm_start, seed)
    stage = load_run(RUN_FILE).stages[1]
    held_out = stage.evaluation
    assert held_out is not None
    assert held_out.taskset is not None
    _write(folder / "train.jsonl", rows(**stage.required_taskset.options))
    _write(folder / "held_out.jsonl", rows(**{**held_out.taskset.options, "size": HELD_OUT}))
    settings = {
        "prompts": stage.rollout.batch,
        "group": stage.rollout.group_size,
        "new_tokens": stage.rollout.max_new_tokens,
        "lr": stage.trainer.lr,
        "betas": stage.trainer.betas,
        "eps": stage.trainer.eps,
        "weight_decay": stage.trainer.weight_decay,
        "max_grad_norm": stage.trainer.max_grad_norm,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def checkpoint(name: str, run: dict[str, Any], seed: int) -> Path:
    """A folder with `model`, the last checkpoint of a run; created if absent."""
    folder = cache_dir() / f"{name}-{_key(yaml.safe_dump(run))}-{seed}"
    if not (folder / "model").exists():
        _train(folder, run, seed)
    return folder


def _train(folder: Path, run: dict[str, Any], seed: int) -> None:
    note(f"  warm-starting the checkpoint of seed {seed} ...")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "warm-start.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "rollmill", "run", str(folder / "warm-start.yaml"), "--out", str(folder / "run")]
    done = subprocess.run(
        [*command, "--set", f"seed={seed}"],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"the warm start failed:\n{done.stderr[-2000:]}")
    newest = max((folder / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.copytree(newest, folder / "model.new")
    (folder / "model.new").rename(folder / "model")


def _key(run_file: str) -> str:
    made_of = f"{run_file}{ADDITION.read_text()}{HELD_OUT}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:8]


def _write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
