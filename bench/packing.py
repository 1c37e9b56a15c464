"""Seconds of the trainer's forward and backward pass over packed rows, against batches padded to the longest.

64 completions with log-normal lengths (median 64, sigma 0.8, at most 512), each after a different prompt of 8 to 64
tokens. `token_ratio` is padded tokens per real token, and `share` is the ratio relative to it.
"""

from __future__ import annotations

import argparse
import json
import math
import random

from bench.harness import Side, run_in_turn
from bench.prefix import memory, token_ratio
from bench.report import Case, best, finish

PADDED = {"padded, 1024 tokens a pass": 1024, "padded, 8192 tokens a pass": 8192}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench packing", description=__doc__)
    parser.add_argument("--model", default="m3")
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--median", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    groups = json.dumps(lengths(args.completions, args.median, args.longest))
    common = ("--model", args.model, "--groups", groups, "--dtype", args.dtype)
    sides = [Side("packed", "bench.ours.passes", common)]
    sides += [Side(name, "bench.ours.padded", (*common, "--budget", str(budget))) for name, budget in PADDED.items()]
    ours, *peers = run_in_turn(sides, args.rounds)
    fastest = best(peers, "seconds", higher_is_better=False)
    tokens = token_ratio(ours, fastest)
    case = Case(
        f"{args.model}, {args.completions} completions",
        fastest.name,
        "s",
        ours.values("seconds"),
        fastest.values("seconds"),
        higher_is_better=False,
    )
    share = round(case.summary()["ratio"] / tokens, 3)
    case.extra = {"token_ratio": tokens, "share": share, "dtype": args.dtype, **memory(ours, fastest)}
    versions = {one.name: one.ready["versions"] for one in (ours, *peers)}
    if not only_json:
        print(f"{tokens} padded tokens per real token; the ratio is {share} of that; {memory(ours, fastest)}")
    finish("packing", [case], versions=versions, only_json=only_json, raw=[ours, *peers])


def lengths(completions: int, median: int, longest: int, sigma: float = 0.8) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt (8 to 64) and of its completion (log-normal, 2 to `longest`); deterministic."""
    source = random.Random(0)
    drawn = []
    for _ in range(completions):
        completion = round(source.lognormvariate(math.log(median), sigma))
        drawn.append((source.randint(8, 64), [min(max(completion, 2), longest)]))
    return drawn
