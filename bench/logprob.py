"""Peak memory of log-probs and their backward pass over a vocabulary of 151,936: in chunks against the whole matrix.

8,192 tokens, hidden size 256, fp32; memory above the inputs, gradients included. The naive path holds three such
matrices of 4.6 GiB. If four do not fit in memory, it gets 2,048 tokens, and ours is compared at both counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from bench.harness import Measured, Side, note, run_in_turn
from bench.report import Case, finish

FEWER = 2048


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench logprob", description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--naive-tokens", type=int, help="tokens of the naive path; default: as memory allows")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    naive_tokens = args.naive_tokens or (args.tokens if fits(args.tokens, args.vocab) else min(FEWER, args.tokens))
    if naive_tokens < args.tokens:
        note(f"the naive path is measured at {naive_tokens} tokens, not {args.tokens}")
    rest = ("--vocab", str(args.vocab), "--hidden", str(args.hidden))
    sides = [
        Side(f"ours {tokens}", "bench.ours.logprob", ("--tokens", str(tokens), *rest))
        for tokens in sorted({args.tokens, naive_tokens}, reverse=True)
    ]
    sides.append(Side("log_softmax", "bench.peers.torch_logprob", ("--tokens", str(naive_tokens), *rest)))
    *ours, naive = run_in_turn(sides, args.rounds)
    check(ours[-1], naive)
    case = Case(
        f"{naive_tokens} tokens x {args.vocab}",
        naive.name,
        "MiB",
        ours[-1].values("peak_mib"),
        naive.values("peak_mib"),
        higher_is_better=False,
        extra={
            "seconds": medians(ours[-1])["seconds"],
            "peer_seconds": medians(naive)["seconds"],
            "ours_by_tokens": {one.name.split()[1]: medians(one) for one in ours},
        },
    )
    if not only_json:
        for one in (*ours, naive):
            print(one.name, medians(one))
    versions = {one.name: one.ready["versions"] for one in (*ours, naive)}
    finish("logprob", [case], versions=versions, only_json=only_json, raw=[*ours, naive])


def fits(tokens: int, vocab: int) -> bool:
    """Whether four fp32 matrices [tokens, vocab] fit in the free memory."""
    import psutil

    return bool(psutil.virtual_memory().available > 4 * 4 * tokens * vocab)


def check(ours: Measured, naive: Measured) -> None:
    """Raise unless both computed the same loss and gradient."""
    for key in ("loss", "grad_norm"):
        own, other = ours.rounds[0][key], naive.rounds[0][key]
        assert math.isclose(own, other, rel_tol=1e-4), f"{key}: {own} is not {other}"


def medians(one: Measured) -> dict[str, Any]:
    """Median peak and time."""
    return {key: round(statistics.median(one.values(key)), 2) for key in ("peak_mib", "seconds")}
