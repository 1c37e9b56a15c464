"""Packing: which units of work go into which forward pass, on which rank.

Sort by cost, deal over the ranks, Best-Fit into chunks of a budget, the same number of chunks on every rank
(DeepSeek-R1's RL infrastructure, arXiv:2501.12948).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_rows(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Chunks of units for every rank: `result[rank][chunk]` is a list of indices into `costs`.

    A chunk costs at most `budget`; only a unit that costs more stands alone in a larger one. Every unit is in exactly
    one chunk. All ranks have equally many chunks: where a rank has fewer, its largest are cut in two, and where there
    is nothing left to cut it gets empty ones.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for n, unit in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
        turn, place = divmod(n, ranks)
        dealt[place if turn % 2 == 0 else ranks - 1 - place].append(unit)
    packed = [_best_fit(units, costs, budget) for units in dealt]
    most = max(len(chunks) for chunks in packed)
    return [_cut(chunks, costs, most) for chunks in packed]


def _best_fit(units: list[int], costs: Sequence[int], budget: int) -> list[list[int]]:
    """Best-Fit Decreasing: a unit goes to the fullest chunk that has room for it. `units` are sorted by cost."""
    chunks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, -chunk), sorted; of equally full chunks the newest
    for unit in units:
        at = bisect_left(room, (costs[unit], -len(chunks)))
        if at == len(room):
            chunks.append([unit])
            insort(room, (budget - costs[unit], 1 - len(chunks)))
        else:
            free, chunk = room.pop(at)
            chunks[-chunk].append(unit)
            insort(room, (free - costs[unit], chunk))
    return chunks


def _cut(chunks: list[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    while len(chunks) < count:
        whole = [chunk for chunk in chunks if len(chunk) > 1]
        if not whole:
            return chunks + [[] for _ in range(count - len(chunks))]
        largest = max(whole, key=lambda chunk: sum(costs[unit] for unit in chunk))
        place = chunks.index(largest)
        chunks[place : place + 1] = [largest[::2], largest[1::2]]
    return chunks
