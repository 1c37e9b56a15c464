"""What goes into which row: every unit once, within the budget, near the fewest rows, as many on every rank."""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.trainer.batch import build_micro_batches, build_token_table, pack_rows

CPU = torch.device("cpu")
COSTS = st.lists(st.integers(1, 120), max_size=40)
BUDGET = st.integers(20, 150)


def _fewest(costs: list[int], budget: int) -> int:
    """The least number of chunks, by going through all subsets: (chunks, fill of the last) is best when smallest."""

    @cache
    def best(left: int) -> tuple[int, int]:
        if not left:
            return 1, 0
        found = []
        for i, cost in enumerate(costs):
            if left >> i & 1:
                chunks, fill = best(left & ~(1 << i))
                found.append((chunks, fill + cost) if fill + cost <= budget else (chunks + 1, cost))
        return min(found)

    return best((1 << len(costs)) - 1)[0] if costs else 0


@given(costs=COSTS, budget=BUDGET, ranks=st.integers(1, 5))
def test_every_unit_is_in_one_chunk_and_chunks_keep_to_the_budget(costs: list[int], budget: int, ranks: int) -> None:
    packed = pack_rows(costs, budget, ranks)
    assert sorted(unit for chunks in packed for chunk in chunks for unit in chunk) == list(range(len(costs)))
    for chunk in (chunk for chunks in packed for chunk in chunks):
        assert len(chunk) == 1 or sum(costs[unit] for unit in chunk) <= budget


@given(costs=COSTS, budget=BUDGET, ranks=st.integers(1, 5))
def test_ranks_have_equally_many_chunks_and_an_empty_one_only_for_want_of_units(
    costs: list[int], budget: int, ranks: int
) -> None:
    packed = pack_rows(costs, budget, ranks)
    assert len(packed) == ranks
    assert len({len(chunks) for chunks in packed}) == 1
    for chunks in packed:
        assert all(chunks) or max(map(len, chunks)) <= 1
    counts = [sum(map(len, chunks)) for chunks in packed]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None, max_examples=60)
@given(costs=st.lists(st.integers(1, 100), max_size=9), budget=st.just(100))
def test_one_rank_has_at_most_eleven_ninths_of_the_fewest_chunks(costs: list[int], budget: int) -> None:
    """Best-Fit Decreasing needs at most 11/9 of the fewest chunks, and a constant (Johnson et al. 1974, SIAM J. Comput.
    3(4))."""
    fewest, chunks = _fewest(costs, budget), len(pack_rows(costs, budget)[0])
    assert ceil(sum(costs) / budget) <= fewest <= chunks <= 11 / 9 * fewest + 1


@given(costs=st.lists(st.integers(1, 18), min_size=1, max_size=200))
def test_small_units_fill_all_chunks_but_one(costs: list[int]) -> None:
    """A chunk is opened only when a unit fits nowhere: all others are then fuller than the budget less that unit."""
    chunks = len(pack_rows(costs, 100)[0])
    assert chunks <= ceil(sum(costs) / (101 - max(costs)))
    assert chunks <= 11 / 9 * ceil(sum(costs) / 100) + 1


def test_a_unit_goes_to_the_fullest_chunk_with_room() -> None:
    assert pack_rows([20, 30, 40, 50, 60], 100) == [[[4, 2], [3, 1, 0]]]  # 40 beside 50 would take a third chunk


def test_the_fewest_chunks_by_hand() -> None:
    assert _fewest([60, 60, 40, 40], 100) == 2
    assert _fewest([51, 51, 51], 100) == 3
    assert _fewest([50, 50, 34, 33, 33], 100) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 9),
    groups=st.integers(1, 5),
    size=st.integers(1, 4),
    budget=st.integers(1, 200),
    ranks=st.integers(1, 3),
    share=st.booleans(),
)
def test_kept_groups_are_never_cut(
    make_batch: Any, seed: int, groups: int, size: int, budget: int, ranks: int, share: bool
) -> None:
    batch = make_batch(seed=seed, groups=groups, size=2 * size)
    for e in batch:  # two groups for every prompt
        e.group += "ab"[int(e.id.rpartition("-")[2]) // size]
    table = build_token_table(batch, CPU)
    rows = [
        row.experiences
        for rank in range(ranks)
        for row in build_micro_batches(
            batch,
            table,
            range(len(batch)),
            budget,
            CPU,
            share_prefixes=share,
            keep_groups=True,
            ranks=ranks,
            rank=rank,
        )
    ]
    assert sorted(i for row in rows for i in row) == list(range(len(batch)))
    homes: dict[str, set[int]] = {}
    for n, row in enumerate(rows):
        for i in row:
            homes.setdefault(batch[i].group, set()).add(n)
    assert all(len(places) == 1 for places in homes.values())


def test_groups_are_cut_where_nothing_keeps_them(make_batch: Any) -> None:
    batch = make_batch(groups=1, size=4)
    rows = [
        build_micro_batches(batch, build_token_table(batch, CPU), range(4), 1, CPU, keep_groups=keep)
        for keep in (False, True)
    ]
    assert [len(each) for each in rows] == [4, 1]


def test_ranks_are_dealt_the_largest_in_turn_there_and_back() -> None:
    assert pack_rows([6, 5, 4, 3, 2, 1], 100, ranks=2) == [[[0, 3, 4]], [[1, 2, 5]]]
    assert pack_rows([6, 5, 4, 3, 2, 1], 100, ranks=3) == [[[0, 5]], [[1, 4]], [[2, 3]]]


def test_a_rank_with_fewer_chunks_halves_its_largest() -> None:
    assert pack_rows([10, 3, 3, 3, 3, 1, 1, 1], 10, ranks=2) == [[[0], [3, 4, 7]], [[1, 5], [2, 6]]]
    assert pack_rows([7, 7, 6, 6, 6, 3, 3, 1], 10, ranks=2) == [[[0, 7], [3], [4]], [[1], [5], [2, 6]]]
    assert pack_rows([9, 9, 9, 9, 9], 10, ranks=2) == [[[0], [3], [4]], [[1], [2], []]]
