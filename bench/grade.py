"""Answers graded per second on two cores: the math reward against math-verify alone.

4,000 completions of GSM8K and competition problems; every second reference is a neighbour's. Both sides have two
processes for math-verify; ours compares texts, numbers and structures first.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Side, run_in_turn
from bench.report import Case, finish


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench grade", description=__doc__)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    count = ("--count", str(args.count))
    sides = [Side("ours", "bench.ours.grade", count), Side("math-verify", "bench.peers.math_verify_grade", count)]
    measured = run_in_turn(sides, args.rounds, pinned=False)
    ours, peer = measured
    case = Case(
        f"{args.count} answers",
        "math-verify 0.9",
        "answers/s",
        ours.values("per_second"),
        peer.values("per_second"),
        higher_is_better=True,
        extra={
            "expected_correct": args.count // 2,
            "correct": {one.name: statistics.median(one.values("correct")) for one in measured},
            "asked_math_verify": statistics.median(ours.values("asked")),
            "not_judged": statistics.median(ours.values("not_judged")),
        },
    )
    versions = {one.name: one.ready["versions"] for one in measured}
    finish("grade", [case], versions=versions, threads=2, only_json=only_json, raw=measured)
