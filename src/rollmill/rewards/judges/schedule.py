"""Who meets whom among siblings."""

from __future__ import annotations

import random
from itertools import combinations


def pair_opponents(count: int, opponents: int | None, seed: str) -> list[tuple[int, int]]:
    """Pairs (i, j) with i < j of `count` players, such that each meets `opponents` others; None: all.

    The players sit in a random circle, and each meets the nearest on both sides; where the number is odd, also who sits
    opposite. (With odd `count` and odd `opponents` one player meets one more.)
    """
    if opponents is None or opponents >= count - 1:
        return list(combinations(range(count), 2))
    circle = list(range(count))
    random.Random(seed).shuffle(circle)
    steps = [(i, i + step) for step in range(1, opponents // 2 + 1) for i in range(count)]
    if opponents % 2:
        steps += [(i, i + count // 2) for i in range((count + 1) // 2)]
    pairs = {tuple(sorted((circle[i], circle[j % count]))) for i, j in steps}
    return sorted((pair[0], pair[1]) for pair in pairs)
