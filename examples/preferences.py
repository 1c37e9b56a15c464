"""Rows for the examples of reward models: the sums below ten."""

from __future__ import annotations

from collections.abc import Iterator

SUMS = [(a, b) for a in range(10) for b in range(10 - a)]


def pairs() -> Iterator[dict[str, str]]:
    """Each sum with its answer and every wrong one: {"prompt": "3+4=", "chosen": "7", "rejected": "5"}."""
    for a, b in SUMS:
        for wrong in set(range(10)) - {a + b}:
            yield {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}


def guesses() -> Iterator[dict[str, str]]:
    """Answers of a teacher that is right half of the time: {"prompt": "3+4=", "answer": "7", "response": "5"}."""
    for a, b in SUMS:
        for guess in [*range(10), *[a + b] * 8]:
            yield {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(guess)}
