"""Worker: grades a list of answers with math-verify alone, in two processes, as its documentation shows."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

from grading_bench.answers import pairs

from bench.worker import Channel, serve, versions


def judged(pair: tuple[str, str]) -> bool:
    """Whether math-verify accepts the completion's answer."""
    from math_verify import parse, verify

    text, answer = pair
    return bool(verify(parse(f"${answer}$"), parse(text)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4000)
    args = parser.parse_args()
    channel = Channel()
    answers = pairs(args.count)
    with multiprocessing.get_context("spawn").Pool(2) as pool:

        def run() -> dict[str, Any]:
            started = time.perf_counter()
            found = pool.map(judged, answers, chunksize=20)
            return {"per_second": len(answers) / (time.perf_counter() - started), "correct": sum(found)}

        serve(channel, run, versions=versions("math-verify", "sympy"))


if __name__ == "__main__":
    main()
