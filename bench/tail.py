"""Training tokens per second with long-tailed lengths: partial rollouts and over-sampling, against waiting for all.

32 completions per step (4 prompts x 8) of log-normal length: sigma 1, median 16, at most 256. `partial` stores
unfinished completions when a token budget is spent; its peer waits for all, with the same max_staleness. `oversample`
starts a quarter more groups and takes the first; its peer is the synchronous loop. No prompt may be lost or duplicated.
Seconds are processor time of the one thread that rolls out and trains. On a CPU the time of an engine pass is nearly
proportional to its rows; where it is constant, `per_pass_ratio` is the gain.
Quality: sampled accuracy of the quickstart's repair from the same checkpoint, with and without either.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any, NamedTuple

from bench.harness import BenchError, Measured, Side, Worker, note, run_in_turn
from bench.learn import task_folder
from bench.report import Case, finish


class Size(NamedTuple):
    """Size of the workload."""

    prompts: int
    group: int
    median: int
    longest: int
    steps: int

    @property
    def budget(self) -> int:
        """Mean number of tokens of a step's completions (the mean is exp(.5) times the median)."""
        return round(self.prompts * self.group * self.median * 1.6)

    def arguments(self) -> tuple[str, ...]:
        """Command-line arguments of the worker."""
        return tuple(text for name, value in self._asdict().items() for text in (f"--{name}", str(value)))


MODELS = {
    "test": ("tiny", Size(3, 2, 6, 48, 4)),
    "tiny": ("tiny", Size(4, 8, 16, 256, 8)),
    "m3": ("m3", Size(8, 8, 32, 512, 8)),
}
OVERSAMPLE, STALENESS = 0.25, 2
REPAIR_BUDGET = 3000
"""Token budget, of about 4,200 tokens that a step of the repair has."""


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench tail", description=__doc__)
    parser.add_argument("--model", default="tiny", choices=tuple(MODELS))
    parser.add_argument("--ways", default="partial,oversample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", default="0,1,2", help="of the repair; empty leaves it out")
    parser.add_argument("--repair-steps", type=int, default=50)
    args = parser.parse_args(arguments)
    model, size = MODELS[args.model]
    ways = {"partial": (STALENESS, {"token_budget": size.budget}), "oversample": (0, {"oversample": OVERSAMPLE})}
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.ways.split(","):
        staleness, rollout = ways[name]
        note(f"{name}:")
        shared = ("--model", model, *size.arguments(), "--max-staleness", str(staleness))
        sides = [
            Side(name, "bench.ours.tail", (*shared, "--rollout", json.dumps(rollout))),
            Side(f"waiting ({name})", "bench.ours.tail", shared),
        ]
        measured = run_in_turn(sides, args.rounds, warmups=0)  # workers warm up on their own
        for one in measured:
            complete(one)
        cases.append(compare(name, *measured))
        raw += measured
    learned = quality(args) if args.seeds else []
    for case in cases:
        case.extra |= {"accuracy": {each.name: each.values("accuracy") for each in learned if case.case in each.name}}
        case.extra["accuracy"] |= {each.name: each.values("accuracy") for each in learned if "waiting" in each.name}
    versions = {one.name: one.ready["versions"] for one in raw}
    finish("tail", cases, versions=versions, only_json=only_json, raw=raw + learned)


def complete(one: Measured) -> None:
    """Raises BenchError if a prompt was lost or used twice."""
    for key in ("lost", "doubled"):
        if any(one.values(key)):
            raise BenchError(f"{one.name}: prompts {key}: {one.values(key)}")


def compare(name: str, ours: Measured, peer: Measured) -> Case:
    """Compare training tokens per second of rollouts; `extra` has those per second of whole steps, and the bias."""
    whole = [a / b for a, b in zip(ours.values("per_second_of_steps"), peer.values("per_second_of_steps"), strict=True)]
    extra: dict[str, Any] = {
        "per_pass_ratio": round(ours.rounds[0]["per_pass"] / peer.rounds[0]["per_pass"], 3),
        "whole_steps_ratio": round(statistics.median(whole), 3),
        "generated_per_learned": round(ours.rounds[0]["generated"] / ours.rounds[0]["tokens"], 3),
        "length_bias": ours.rounds[0]["length_bias"],
        "true_bias": round(ours.rounds[0]["true_bias"], 3),
        "prompts": {one.name: one.rounds[0]["prompts"] for one in (ours, peer)},
    }
    rates = (ours.values("per_second"), peer.values("per_second"))
    return Case(name, "waiting for the slowest", "tokens/s", *rates, higher_is_better=True, extra=extra)


def quality(args: argparse.Namespace) -> list[Measured]:
    """Run the repair with each method; one round per seed."""
    ways = {
        "repair, waiting": (0, {}),
        "repair, oversample": (0, {"oversample": OVERSAMPLE}),
        f"repair, waiting, max_staleness {STALENESS}": (STALENESS, {}),
        "repair, partial": (STALENESS, {"token_budget": REPAIR_BUDGET}),
    }
    found = {name: Measured(name, {}, []) for name in ways}
    for seed in map(int, args.seeds.split(",")):
        folder = task_folder(seed)
        for name, (staleness, rollout) in ways.items():
            options = ["--folder", str(folder), "--seed", str(seed), "--steps", str(args.repair_steps)]
            options += ["--max-staleness", str(staleness), "--rollout", json.dumps(rollout)]
            worker = Worker(Side(f"{name}, seed {seed}", "bench.ours.tail", tuple(options)))
            try:
                found[name].ready = worker.ready
                found[name].rounds.append(worker.run())
                note(f"  {name}, seed {seed}: {found[name].rounds[-1]}")
            finally:
                worker.close()
    return list(found.values())
