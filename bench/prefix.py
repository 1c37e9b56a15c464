"""Seconds of the trainer's forward and backward pass with the prompt computed once, against once per completion.

One prompt of 512 tokens with 8 completions of 128, 25M parameters. Both sides are the trainer's packed rows with the
same loss. `bound` is the ratio of the tokens in the rows, `memory_ratio` that of the peak memory above the model. The
shared row is never split, while unshared completions are computed one row at a time, so sharing may need more memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

from bench.harness import Measured, Side, run_in_turn
from bench.report import Case, finish


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench prefix", description=__doc__)
    parser.add_argument("--model", default="m25")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    groups = json.dumps([[args.prompt, [args.new_tokens] * args.group]])
    common = ("--model", args.model, "--groups", groups, "--dtype", args.dtype)
    shared, unshared = run_in_turn(
        [
            Side("shared", "bench.ours.passes", common),
            Side("unshared", "bench.ours.passes", (*common, "--unshared")),
        ],
        args.rounds,
    )
    bound = token_ratio(shared, unshared)
    case = Case(
        f"{args.model}, {args.group} x ({args.prompt} + {args.new_tokens})",
        unshared.name,
        "s",
        shared.values("seconds"),
        unshared.values("seconds"),
        higher_is_better=False,
        extra={"bound": bound, "dtype": args.dtype, **memory(shared, unshared)},
    )
    versions = {one.name: one.ready["versions"] for one in (shared, unshared)}
    if not only_json:
        print(f"at most {bound} by tokens; {memory(shared, unshared)}")
    finish("prefix", [case], versions=versions, only_json=only_json, raw=[shared, unshared])


def token_ratio(ours: Measured, peer: Measured) -> float:
    """The peer's tokens per token of ours. Raises if loss and gradient differ."""
    ours_first, peer_first = ours.rounds[0], peer.rounds[0]
    tolerance = 1e-4 if ours.ready["dtype"] == "fp32" else 0.03
    for key in ("loss", "grad_norm"):
        assert math.isclose(ours_first[key], peer_first[key], rel_tol=tolerance), f"{key}: {ours_first} {peer_first}"
    ratio: float = round(peer_first["tokens"] / ours_first["tokens"], 3)
    return ratio


def memory(ours: Measured, peer: Measured) -> dict[str, float]:
    """Median peaks above the model in MiB, and their ratio."""
    own, other = (statistics.median(one.values("peak_mib")) for one in (ours, peer))
    return {"peak_mib": round(own, 1), "peer_peak_mib": round(other, 1), "memory_ratio": round(other / own, 3)}
