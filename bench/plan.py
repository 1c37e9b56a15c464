"""Predictions of `rollmill plan` against runs: seconds per step, tokens per second, memory peaks.

Prediction and run are fresh processes, one after the other. The ratio is measured over predicted seconds; a prediction
counts as right within a quarter. Memory is measured with `offload`, which records peaks by phase.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.harness import ROOT, Measured, Side, note, run_in_turn
from bench.report import Case, finish

PEAKS = "offload={budget_gb: 1000}"
SELDOM = ("evaluation.every=100000", "evaluation.limit=2", "evaluation.at_start=false")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "minimal": ("examples/minimal.yaml", (*SELDOM, "steps=60", PEAKS)),
    "sft": ("examples/sft.yaml", (*SELDOM, "steps=200")),
    "ppo": (
        "examples/ppo.yaml",
        (
            *SELDOM,
            "stages.0.steps=100",
            "stages.0.trainer.lr=1e-9",
            "stages.0.trainer.warmup_steps=0",
            "stages.1.steps=24",
            "stages.1.algorithm.critic.warmup_steps=0",
            f"stages.1.{PEAKS}",
        ),
    ),
    "larger": ("bench/plan.yaml", ("trainer.lr=1e-9", PEAKS)),
}
"""By name: a run file, and overrides that make its run short and keep completions those of the initial model."""
CLOSE, COMPARED = 0.25, ("seconds/total", "tokens_per_second")


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--processor-time", action="store_true", help="of one process, on a machine that others use")
    args = parser.parse_args(arguments)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.runs.split(","):
        note(f"{name}:")
        rounds = [
            run_in_turn(_sides(name, args.processor_time), 1, warmups=0, pinned=False) for _ in range(args.rounds)
        ]
        plan, run = (_joined([pair[side] for pair in rounds], f"{name} {rounds[0][side].name}") for side in (0, 1))
        for stage in run.rounds[0]["stages"]:
            cases.append(compare(name, stage, plan, run))
        raw += [plan, run]
    finish("plan", cases, versions=raw[0].ready["versions"], only_json=only_json, raw=raw)


def compare(name: str, stage: str, plan: Measured, run: Measured) -> Case:
    """Compare one stage: seconds per step as the case's value, and the relative error of all other values."""

    def values(side: Measured, key: str) -> list[float]:
        return [each["stages"][stage][key] for each in side.rounds]

    known = set(plan.rounds[0]["stages"][stage]) & set(run.rounds[0]["stages"][stage])
    checked: dict[str, Any] = {}
    for key in sorted(key for key in known if key in COMPARED or key.startswith("memory/")):
        predicted, measured = (statistics.median(values(side, key)) for side in (plan, run))
        off = predicted / measured - 1
        checked[key] = {"predicted": round(predicted, 4), "measured": round(measured, 4), "off_by": round(off, 3)}
        note(f"  {stage} {key}: predicted {predicted:.4g}, measured {measured:.4g}, off by {off:+.1%}")
    holds = all(abs(each["off_by"]) <= CLOSE for each in checked.values())
    phases = {key: [statistics.median(values(side, key)) for side in (plan, run)] for key in known if "seconds/" in key}
    extra = {"checked": checked, "within_a_quarter": holds, "phases_predicted_measured": phases}
    seconds = values(plan, "seconds/total"), values(run, "seconds/total")
    return Case(f"{name} {stage}", "the run", "s/step", *seconds, higher_is_better=False, extra=extra)


def _sides(name: str, processor_time: bool) -> list[Side]:
    file, settings = RUNS[name]
    options = ("--config", str(ROOT / file), *(f"--set={setting}" for setting in settings))
    options = (*options, *(["--processor-time"] * processor_time))
    kinds = ("predicted", "measured")
    return [Side(kind, "bench.ours.plan", ("--kind", kind, *options)) for kind in kinds]


def _joined(parts: list[Measured], name: str) -> Measured:
    return Measured(name, parts[0].ready, [round_ for part in parts for round_ in part.rounds])
