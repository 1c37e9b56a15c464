"""Answers graded per second: `MathGrader` against math-verify alone, on real completions, in as many processes each."""

from __future__ import annotations

import multiprocessing
import time

from rollmill_grading import MathGrader


def by_library(pairs: list[tuple[str, str]], workers: int, rounds: int) -> tuple[list[float], int]:
    """Answers per second in each round, and the number of accepted ones."""
    texts, references = zip(*pairs, strict=True)
    seconds, accepted = [], 0
    with MathGrader(workers=workers) as grader:
        grader.grade_all([r"\sqrt{12}"] * workers, [r"2\sqrt{3}"] * workers)  # starts the processes
        for _ in range(rounds):
            started = time.perf_counter()
            accepted = sum(verdict.correct for verdict in grader.grade_all(texts, references))
            seconds.append(time.perf_counter() - started)
    return [len(pairs) / each for each in seconds], accepted


def by_math_verify(pairs: list[tuple[str, str]], workers: int, rounds: int) -> tuple[list[float], int]:
    """The same for math-verify, as its documentation shows."""
    seconds, accepted = [], 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(verify_pair, pairs[:20], chunksize=5)  # starts the processes
        for _ in range(rounds):
            started = time.perf_counter()
            accepted = sum(pool.map(verify_pair, pairs, chunksize=20))
            seconds.append(time.perf_counter() - started)
    return [len(pairs) / each for each in seconds], accepted


def verify_pair(pair: tuple[str, str]) -> bool:
    """Say if math-verify accepts a completion's answer."""
    from math_verify import parse, verify

    text, answer = pair
    return bool(verify(parse(f"${answer}$"), parse(text)))
