"""Worker: torch.multinomial(softmax(logits)), and the log-prob of the sample, as our sampler returns it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from bench.worker import Channel, serve, versions


def shape() -> tuple[int, int]:
    """Rows and vocabulary, from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    args = parser.parse_args()
    return args.rows, args.vocab


def timed(call: Callable[[], object], calls: int = 10) -> dict[str, float]:
    """Median milliseconds of one call."""
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return {"ms": statistics.median(seconds) * 1e3}


def main() -> None:
    channel, (rows, vocab) = Channel(), shape()
    import torch

    torch.set_num_threads(1)
    logits_BV = torch.randn(rows, vocab)

    def draw() -> torch.Tensor:
        probs_BV = torch.softmax(logits_BV, -1)
        tokens_B = torch.multinomial(probs_BV, 1)
        return probs_BV.gather(1, tokens_B).log()

    serve(channel, lambda: timed(draw), versions=versions("torch"))


if __name__ == "__main__":
    main()
