"""Preference pairs for examples/dpo.yaml: the right working of a two-digit sum, and one that gets the carry wrong.

Where the sum has a carry, the rejected working is the teacher's who forgets it; where it has none, one is made up.
With the first kind alone the model learns that a carry is always preferred, and unlearns sums without one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.quickstart.addition import rows


def pairs(size: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows with prompt, answer, chosen and rejected."""
    for row in rows(size, seed, digits=2):
        a, b = map(int, row["prompt"].split("+"))
        yield {
            "prompt": row["prompt"],
            "answer": row["answer"],
            "chosen": row["response"],
            "rejected": wrong_carry(a, b),
        }


def wrong_carry(a: int, b: int) -> str:
    """The working of a + b with the carry forgotten, or made up."""
    units = a % 10 + b % 10
    carry = 0 if units >= 10 else 1
    tens = a // 10 + b // 10 + carry
    working = f"{a % 10}+{b % 10}+0={units:02d} {a // 10}+{b // 10}+{carry}={tens:02d}"
    return f"{working} #{10 * tens + units % 10}"
