"""Time of rollouts and rewards together, relative to the longer of the two: ours against TRL's GRPOTrainer.

64 completions (8 prompts x 8) of 32 tokens on average and at most 96; all rewards, one after the other, take as long as
the rollouts. 1.0 is perfect overlap, 2.0 is none. Rollouts have one core, a computing reward another.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.report import Case, finish
from bench.step import TRL_HOW

REWARDS = {"computing": (), "waiting": ("--waits",)}
SIZES = {
    "tiny": ("--prompts", "4", "--group", "4", "--new-tokens", "24", "--mean-tokens", "8"),
    "m25": ("--prompts", "8", "--group", "8", "--new-tokens", "96", "--mean-tokens", "32"),
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench overlap", description=__doc__)
    parser.add_argument("--model", default="m25", choices=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    cases: list[Case] = []
    raw: list[Measured] = []
    for kind, options in REWARDS.items():
        note(f"rewards that spend their time {kind}:")
        shared = ("--model", args.model, *SIZES[args.model], *options)
        sides = [
            Side("ours", "bench.ours.overlap", shared),
            Side("trl", "bench.peers.trl_overlap", (*shared, "--dtype", "bf16", "--micro-batch", "16")),
        ]
        measured = run_in_turn(sides, args.rounds, pinned=False)
        cases.append(compare(kind, *measured))
        raw += measured
    versions = {one.name: one.ready["versions"] for one in raw}
    finish("overlap", cases, versions=versions, threads=1, only_json=only_json, raw=raw)


def compare(kind: str, ours: Measured, peer: Measured) -> Case:
    """Compare both sides in units of their longer part; `extra` has seconds."""
    keys = ("rollout_s", "rewards_s", "together_s")
    seconds = {one.name: {key: round(statistics.median(one.values(key)), 3) for key in keys} for one in (ours, peer)}
    return Case(
        f"rewards {kind}",
        "TRL 1.16",
        "x the longer part",
        ours.values("of_the_longer"),
        peer.values("of_the_longer"),
        higher_is_better=False,
        extra={"seconds": seconds},
    )
