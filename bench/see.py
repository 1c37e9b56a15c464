"""Processor seconds for one full GRPO step on pictures: ours against TRL's GRPOTrainer, and against one tower pass per
completion.

64 completions (8 prompts x 8) of 64 tokens, one thread; a prompt has a picture of 64 tokens and 20 words. The model is
a LLaVA with random weights and a frozen tower. TRL runs with several settings in turn; the fastest counts.

`--learn` measures instead what examples/see.yaml learns, and writes see_learn.json: `bench/see_learn.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness import ROOT, Measured, Side, need, note, run_in_turn
from bench.report import Case, best, finish
from bench.see_learn import learn
from bench.step import TRL_HOW, TRL_SETTINGS


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench see", description=__doc__)
    parser.add_argument("--models", default="m3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="ours")
    parser.add_argument("--trl", nargs="+", default=["fp32", "bf16"], choices=TRL_SETTINGS, help="settings of TRL")
    parser.add_argument("--learn", action="store_true", help="run examples/see.yaml, and measure nothing else")
    parser.add_argument("--seeds", default="0,1,2", help="of --learn")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs" / "bench-see",
        help="of --learn: where the runs are; finished ones are kept",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of --learn: override a key")
    args = parser.parse_args(arguments)
    if args.learn:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        return learn(seeds, args.runs.absolute(), args.set, only_json)
    need("trl", TRL_HOW)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        own = ("--model", name, "--dtype", args.dtype)
        sides = [Side("ours", "bench.ours.see", own)]
        sides += [Side("tower per completion", "bench.ours.see", (*own, "--tower", "completion"))]
        sides += [
            Side(f"trl {setting}", "bench.peers.trl_see", ("--model", name, *TRL_SETTINGS[setting]))
            for setting in args.trl
        ]
        measured = run_in_turn(sides, args.rounds)
        cases += compare(name, measured)
        raw += measured
    versions = {one.name: one.ready["versions"] for one in raw}
    finish("see", cases, headline=cases[:1], versions=versions, only_json=only_json, raw=raw)


def compare(name: str, measured: list[Measured]) -> list[Case]:
    """Compare ours with the fastest of TRL's settings, and with the tower run once per completion."""
    ours, repeated, *peers = measured
    tokens = {one.rounds[0]["tokens"] for one in measured}
    assert len(tokens) == 1, f"the sides produced different numbers of tokens: {tokens}"
    fastest = best(peers, "cpu_s", higher_is_better=False)
    return [
        Case(
            f"{name}{case}",
            peer.name,
            "s",
            ours.values("cpu_s"),
            peer.values("cpu_s"),
            higher_is_better=False,
            extra={"dtype": ours.ready["dtype"]},
        )
        for case, peer in (("", fastest), (" tower", repeated))
    ]
