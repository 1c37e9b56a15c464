"""Three-digit sums of mixed difficulty: the more carries, the more likely the forgetful policy fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rollmill.quickstart import addition


def rows(size: int, seed: int, shares: Sequence[float], held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Sums with the column `carries`: the number of carries (0 to 2) that can be forgotten.

    Args:
        size: number of sums; all are different.
        seed: seed of the random choice.
        shares: shares of sums with 0, 1 and 2 carries; they add up to 1.
        held_out: draw from the tenth of all sums that is reserved for evaluation.
    """
    wanted = [round(size * share) for share in shares]
    pool = addition.rows(20_000 if held_out else 60_000, seed=seed, held_out=held_out)
    for row in pool:
        carries = _carries(row["prompt"].strip())
        if wanted[carries]:
            wanted[carries] -= 1
            yield {"prompt": row["prompt"], "answer": row["answer"], "carries": carries}
        elif not any(wanted):
            return
    raise ValueError(f"too few sums: {wanted} of {size} are missing")


def _carries(text: str) -> int:
    a, b = map(int, text.split("+"))
    units = a % 10 + b % 10 > 9
    return units + (a // 10 % 10 + b // 10 % 10 + units > 9)
