"""The simulated run against closed forms, and what is true of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.apps.plan.planning.simulation import simulate_stage
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.orchestrator.pacing import Pacing

ROWS, TOKENS, BATCH = 4, 50, 8


def costs(train_s: float, **others: float) -> SimulationCosts:
    """No variance: a pass takes a millisecond a row, so a group takes .2 s of its explorer."""
    return SimulationCosts(groups=[[TOKENS] * ROWS], train_s=[train_s], **{"pass_s": 0.0, "row_s": 1e-3} | others)


def step_s(measured: SimulationCosts, explorers: int, *, staleness: int, steps: int = 400, **options: Any) -> float:
    """In a stage without an end."""
    return simulate_stage(measured, Pacing(BATCH, staleness, 10**6), explorers, steps=steps, **options).step_s()


GROUP_S = ROWS * TOKENS * 1e-3


@pytest.mark.parametrize("explorers", [1, 2, 4, 8])
@pytest.mark.parametrize("train_s", [0.1, 0.5, 3.0])
def test_without_staleness_a_step_is_the_sum(explorers: int, train_s: float) -> None:
    found = simulate_stage(costs(train_s), Pacing(BATCH, 0, 20), explorers)
    assert found.step_s() == pytest.approx(BATCH * GROUP_S / explorers + train_s)
    assert set(found.staleness) == {0}


@pytest.mark.parametrize("explorers", [1, 2, 4, 8])
@pytest.mark.parametrize("train_s", [0.1, 0.5, 3.0])
def test_with_much_staleness_a_step_is_the_longer_part(explorers: int, train_s: float) -> None:
    found = step_s(costs(train_s), explorers, staleness=8, steps=2000)
    assert found == pytest.approx(max(BATCH * GROUP_S / explorers, train_s), rel=1e-2)


def test_in_one_process_nothing_overlaps() -> None:
    for staleness in (0, 1, 4):
        found = step_s(costs(0.5), 1, staleness=staleness, beside=False)
        assert found == pytest.approx(BATCH * GROUP_S + 0.5)


def test_work_besides_decoding_counts() -> None:
    found = simulate_stage(costs(0.5, publish_s=0.1, receive_s=0.2, group_s=0.01, judge_s=0.3), Pacing(BATCH, 0, 20), 1)
    assert found.step_s() == pytest.approx(BATCH * GROUP_S + 0.5 + 0.1 + 0.2 + BATCH * 0.01 + 0.3)


def test_passes_are_shared_by_what_is_decoded_together() -> None:
    found = simulate_stage(costs(0.5, pass_s=1e-2, row_s=0.0), Pacing(BATCH, 0, 20), 1)
    assert found.step_s() == pytest.approx(TOKENS * 1e-2 + 0.5)
    found = simulate_stage(costs(0.5, pass_s=1e-2, row_s=0.0), Pacing(BATCH, 0, 20), 1, max_sequences=BATCH * ROWS // 2)
    assert found.step_s() == pytest.approx(2 * TOKENS * 1e-2 + 0.5)


LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=5)
SECONDS = st.floats(0.01, 2.0)


@given(
    groups=LENGTHS,
    train_s=st.lists(SECONDS, min_size=1, max_size=4),
    batch=st.integers(1, 6),
    staleness=st.integers(0, 5),
    explorers=st.integers(1, 5),
    beside=st.booleans(),
    others=st.tuples(*[st.floats(0.0, 0.5)] * 5),
    seed=st.integers(0, 3),
)
def test_the_bound_on_staleness_and_on_time_holds(
    groups: list[list[int]],
    train_s: list[float],
    batch: int,
    staleness: int,
    explorers: int,
    beside: bool,
    others: tuple[float, ...],
    seed: int,
) -> None:
    pass_s, group_s, judge_s, publish_s, take_s = others
    measured = SimulationCosts(groups, train_s, pass_s, 1e-3, group_s, judge_s, publish_s, take_s)
    found = simulate_stage(measured, Pacing(batch, staleness, 12), explorers, seed=seed, beside=beside)
    assert all(0 <= each <= staleness for each in found.staleness)
    assert found.ends[-1] >= sum(found.trained) + 12 * publish_s - 1e-9
    assert all(each >= 0 for each in found.waited)
    assert found.ends == sorted(found.ends)
    elapsed = sum(found.waited) + sum(found.trained) + 12 * publish_s
    assert found.ends[-1] == pytest.approx(elapsed)


@settings(max_examples=25)
@given(explorers=st.sampled_from([1, 2, 4]), staleness=st.integers(0, 4), train_s=SECONDS, pass_s=st.floats(0.0, 0.05))
def test_more_explorers_and_more_staleness_are_never_slower(
    explorers: int, staleness: int, train_s: float, pass_s: float
) -> None:
    """Where a batch can be shared evenly: else more explorers may take a few per cent longer, as in any schedule."""
    measured = costs(train_s, pass_s=pass_s)
    found = step_s(measured, explorers, staleness=staleness)
    assert step_s(measured, 2 * explorers, staleness=staleness) <= 1.05 * found
    assert step_s(measured, explorers, staleness=staleness + 1) <= 1.05 * found
