"""Completions to a sampled accuracy of .8 on sums of mixed difficulty, by sampler: ours against uniform.

Per seed, the quickstart's first stage makes a warm-started checkpoint (a policy that forgets most carries). Its second
stage repairs it, with every sampler and the same settings, on 240 sums: 90 % without carries, which the policy already
solves, 7 % with one and 3 % with two. Every 4 steps it is evaluated on 600 other sums, a third of each kind. The peer
is the sampler `shuffled`: every task equally often.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.curves import Curve, svg
from bench.harness import BenchError, Measured, Side, Worker, note
from bench.learn import task_folder
from bench.report import Case, finish

TARGET, EVERY = 0.8, 4
PEER = "shuffled"
SAMPLERS: dict[str, dict[str, Any]] = {
    "prioritised": {"name": "prioritised"},
    "posterior": {"name": "posterior"},
    "curriculum": {"name": "curriculum", "warmup": 15},
    PEER: {"name": PEER},
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench curriculum", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samplers", default="prioritised,posterior,curriculum")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    args = parser.parse_args(arguments)
    samplers = [*args.samplers.split(","), PEER]
    raw: list[Measured] = []
    for seed in map(int, args.seeds.split(",")):
        raw += race(seed, samplers, args)
    reached = {
        sampler: [cost(one, args.target) for one in raw if one.name.split()[0] == sampler] for sampler in samplers
    }
    cases = [
        Case(
            f"{sampler}: completions to {args.target:.0%} sampled",
            PEER,
            "completions",
            [one["rollouts"] for one in reached[sampler]],
            [one["rollouts"] for one in reached[PEER]],
            False,
            {"uniform_groups": {each: [one["uniform"] for one in reached[each]] for each in (sampler, PEER)}},
        )
        for sampler in samplers[:-1]
    ]
    if args.svg is not None:
        args.svg.write_text(picture(raw, samplers))
    finish("curriculum", cases, versions=raw[0].ready["versions"], only_json=only_json, raw=raw)


def race(seed: int, samplers: list[str], args: argparse.Namespace) -> list[Measured]:
    """Run all samplers, one after the other, until each has reached the target or `max_steps`."""
    folder = task_folder(seed)
    common = ["--folder", str(folder), "--seed", str(seed), "--every", str(EVERY)]
    common += ["--tasks", str(args.tasks), "--held-out", str(args.held_out)]
    found = []
    for sampler in samplers:
        side = Side(
            f"{sampler} seed {seed}", "bench.ours.curriculum", (*common, "--sampler", json.dumps(SAMPLERS[sampler]))
        )
        worker = Worker(side)
        try:
            one = Measured(side.name, worker.ready, [])
            while len(one.rounds) * EVERY < args.max_steps and not _reached(one, args.target):
                one.rounds.append(worker.run())
            note(f"  {one.name}: {[round(each, 3) for each in (one.ready['accuracy'], *one.values('accuracy'))]}")
            found.append(one)
        finally:
            worker.close()
    return found


def picture(raw: list[Measured], samplers: list[str]) -> str:
    """Draw accuracy over completions, a line for each sampler and seed."""
    curves = []
    for one in raw:
        points = [(0.0, float(one.ready["accuracy"]))]
        for each in one.rounds:
            points.append((points[-1][0] + each["rollouts"], each["accuracy"]))
        sampler = one.name.split()[0]
        curves.append(Curve(sampler, samplers.index(sampler), points))
    return svg("completions", "sampled accuracy on held-out sums", curves)


def _reached(one: Measured, target: float) -> bool:
    return bool(one.rounds) and one.rounds[-1]["accuracy"] >= target


def cost(one: Measured, target: float) -> dict[str, Any]:
    """Completions until the target, and the mean share of uniform groups. Raises BenchError if it was not reached."""
    if not _reached(one, target):
        raise BenchError(f"{one.name} did not reach {target}: {one.values('accuracy')}")
    uniform = one.values("uniform")
    return {"rollouts": sum(one.values("rollouts")), "uniform": round(sum(uniform) / len(uniform), 3)}
