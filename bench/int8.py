"""Rollouts in 8 bits against those in bf16 or fp32: tokens per second, seconds of each update, and what is learned.

`--dtype` is the peer's type: bf16, or fp32 on a machine without products in bf16, where bf16 would be a weak peer.
Speed: 64 completions on one core, after an update of weights in fp32, which the engine casts to that type or rounds.
Learning: the practice stage of three tasks of the board (0.2M to 0.4M parameters), in that type and from one
checkpoint. Rollouts in it are the peer of rollouts in 8 bits with truncated importance sampling (`tis`), and of those
without any correction. Numbers of 4 bits, which the same code rounds to, show what the correction is worth where the
rounded policy is far from the trained one. Every `EVERY` steps the policy, unrounded, answers 500 held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from bench import machine, models
from bench.board import ROWS, practice_file
from bench.harness import Measured, Side, Worker, note, run_in_turn
from bench.report import Case, finish

#: model -> completions of each of 8 prompts, new tokens, rounds
SPEED = {"tiny": (2, 8, 1), "m3": (8, 128, 5), "m25": (8, 128, 3), "m135": (8, 64, 2), "m600": (8, 64, 2)}
TASKS = ("repair", "sorting", "countdown")
INT8 = ("--set", "engine={name: native, weights: int8}", "--evaluate", "engine={name: native}")
INT4 = (*INT8, "--levels", "7")
TIS = ("--set", "algorithm.corrections=[tis]")
WAYS: dict[str, tuple[str, ...]] = {
    "unrounded": (),
    "8 bits, tis": (*INT8, *TIS),
    "8 bits, uncorrected": INT8,
    "4 bits, tis": (*INT4, *TIS),
    "4 bits, uncorrected": INT4,
}
EVERY = 5
LAST = 3  #: evaluations whose mean is a run's final accuracy


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench int8", description=__doc__)
    parser.add_argument("--models", default="m3,m25,m135,m600", help="for speed; empty leaves it out")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="type of the peer, and of training")
    parser.add_argument("--tasks", default=",".join(TASKS), help="rows of the board; empty leaves learning out")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1.0, help="factor of the run files' learning rates")
    args = parser.parse_args(arguments)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in filter(None, args.models.split(",")):
        found = speed(name, args.dtype)
        raw += found
        cases.append(compare(name, args.dtype, *found))
    headline = list(cases)
    for task in filter(None, args.tasks.split(",")):
        learned = {way: learn(task, way, args) for way in WAYS}
        raw += learned.values()
        finals = {way: [round_["accuracy"] for round_ in one.rounds] for way, one in learned.items()}
        for way in list(WAYS)[1:]:
            extra = {"gap": [one["gap"] for one in learned[way].rounds]}
            cases.append(Case(f"{task}, {way}", args.dtype, "accuracy", finals[way], finals["unrounded"], True, extra))
    versions = raw[0].ready["versions"]
    finish("int8", cases, headline=headline or cases, versions=versions, only_json=only_json, raw=raw)


def speed(model: str, dtype: str) -> tuple[Measured, Measured]:
    """Roll out with both, in turn."""
    group, new_tokens, rounds = SPEED[model]
    prompts = json.dumps(models.prompts(model, 8, models.PROMPT))
    common = [
        *("--model", str(models.model_dir(model)), "--prompts", prompts, "--group", str(group)),
        *("--new-tokens", str(new_tokens), "--dtype", dtype, "--updates"),
    ]
    note(f"{model}:")
    sides = [Side(f"int8 {model}", "bench.ours.rollout", (*common, "--int8"))]
    sides.append(Side(f"{dtype} {model}", "bench.ours.rollout", tuple(common)))
    ours, peer = run_in_turn(sides, rounds)
    return ours, peer


def compare(model: str, dtype: str, ours: Measured, peer: Measured) -> Case:
    """Compare tokens per second; `extra` has the seconds of an update, and the ratio with them."""
    whole = [
        (theirs["seconds"] + theirs["update_s"]) / (own["seconds"] + own["update_s"])
        for own, theirs in zip(ours.rounds, peer.rounds, strict=True)
    ]
    extra = {
        "update_s": {
            each.name.split()[0]: round(statistics.median(each.values("update_s")), 3) for each in (ours, peer)
        },
        "ratio_with_update": round(statistics.median(whole), 3),
    }
    rates = ours.values("tokens_per_s"), peer.values("tokens_per_s")
    return Case(f"rollouts {model}", dtype, "tokens/s", *rates, higher_is_better=True, extra=extra)


def learn(task: str, way: str, args: argparse.Namespace) -> Measured:
    """Practise with each seed, as many at a time as there are cores; a round is one seed's final accuracy."""
    found = Measured(f"{task}, {way}", {}, [])

    def practise(seed: int, file: Path) -> dict[str, Any]:
        options = [*WAYS[way], "--set", f"trainer.precision={args.dtype}", "--file", str(file), "--seed", str(seed)]
        options += ["--set", f"trainer.lr={args.lr * _lr(file)}"]
        side = Side(f"{task}, {way}, {seed}", "bench.ours.board", tuple(options), env={"OMP_NUM_THREADS": "1"})
        worker = Worker(side, pinned=False)
        try:
            found.ready = worker.ready
            rounds: list[dict[str, Any]] = [worker.run(steps=EVERY) for _ in range(args.steps // EVERY)]
        finally:
            worker.close()
        curve = [worker.ready["accuracy"], *(one["accuracy"] for one in rounds)]
        final, gap = statistics.mean(curve[-LAST:]), max(one["gap"] for one in rounds)
        note(f"  {found.name}, seed {seed}: {final:.3f} {[round(each, 3) for each in curve]}, gap {gap:.2g}")
        return {"accuracy": final, "curve": [round(each, 3) for each in curve], "gap": round(gap, 5)}

    seeds = [int(seed) for seed in args.seeds.split(",")]
    files = [practice_file(task, ROWS[task], seed) for seed in seeds]
    with ThreadPoolExecutor(len(machine.cores())) as pool:
        found.rounds += pool.map(practise, seeds, files)
    return found


def _lr(file: Path) -> float:
    return float(yaml.safe_load(file.read_text())["trainer"]["lr"])
