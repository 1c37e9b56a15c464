"""Replay: who may be chosen, with which chances, and always the same for the same seed and step."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.buffer_groups import experience, group

from rollmill.buffer.base import Group, VersionSegment, version_segments
from rollmill.buffer.replay import ReplayCandidates, choose_replayed, mean_abs_advantage, replay_quotas
from rollmill.config.buffer import ReplayConfig

DRAWS = 12_000
CRITICAL = {3: 16.266, 11: 31.264}
"""Chi-square by degrees of freedom: exceeded with a chance of 0.001."""


def candidates(priorities: list[float], versions: list[int] | None = None) -> ReplayCandidates:
    """One use each, in step 1."""
    versions = versions or [0] * len(priorities)
    rows = [
        (number, version, priority, "task")
        for number, (version, priority) in enumerate(zip(versions, priorities, strict=True), 1)
    ]
    return ReplayCandidates.of(rows, [(row[0], 1, None) for row in rows])


def draws(found: ReplayCandidates, rule: ReplayConfig, version: int = 0) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(choose_replayed(found, rule, step=step, version=version, seed=7)) for step in range(2, DRAWS + 2)
    )


def chi_square(seen: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    assert math.isclose(sum(chances.values()), 1.0)
    assert seen.keys() <= chances.keys()
    return sum((seen[key] - DRAWS * chance) ** 2 / (DRAWS * chance) for key, chance in chances.items() if chance)


def in_turn(weights: list[float]) -> dict[tuple[int, ...], float]:
    """Chances of ordered pairs drawn without replacement (Plackett and Luce)."""
    total = sum(weights)
    return {
        (i + 1, j + 1): weights[i] / total * weights[j] / (total - weights[i])
        for i, j in permutations(range(len(weights)), 2)
    }


def test_uniform_draws_every_ordered_pair_equally_often() -> None:
    seen = draws(candidates([1.0, 9.0, 0.0, 2.0]), ReplayConfig(groups=2, order="uniform"))
    assert chi_square(seen, in_turn([1.0] * 4)) < CRITICAL[11]


@pytest.mark.parametrize(("exponent", "decay"), [(1.0, 1.0), (2.0, 1.0), (0.5, 0.8), (0.0, 0.5)])
def test_priority_draws_without_replacement_by_weight(exponent: float, decay: float) -> None:
    priorities, versions = [0.5, 1.0, 2.0, 3.0], [3, 0, 2, 5]
    rule = ReplayConfig(groups=2, order="priority", exponent=exponent, decay=decay)
    weights = [
        priority**exponent * decay ** (5 - version) for priority, version in zip(priorities, versions, strict=True)
    ]
    seen = draws(candidates(priorities, versions), rule, version=5)
    assert chi_square(seen, in_turn(weights)) < CRITICAL[11]


def test_imported_groups_of_later_versions_count_as_fresh() -> None:
    """By their number alone they would be drawn 1024 times as often as the run's own."""
    rule = ReplayConfig(groups=2, order="priority", decay=0.5)
    seen = draws(candidates([1.0, 2.0, 1.0, 3.0], [5, 15, 4, 5]), rule, version=5)
    assert chi_square(seen, in_turn([1.0, 2.0, 0.5, 3.0])) < CRITICAL[11]


def test_the_test_of_chances_notices_wrong_ones() -> None:
    seen = draws(candidates([1.0, 1.0, 1.0, 1.3]), ReplayConfig(groups=2, order="priority"))
    assert chi_square(seen, in_turn([1.0] * 4)) > CRITICAL[11]


def test_one_draw_of_priorities_far_apart_is_exact() -> None:
    rule = ReplayConfig(groups=1, order="priority", exponent=3.0)
    weights = [1e-200, 1.0, 2.0, 0.0]
    seen = draws(candidates(weights), rule)
    assert seen.keys() == {(2,), (3,)}
    chances = {(2,): 1 / 9, (3,): 8 / 9}
    assert chi_square(seen, chances) < CRITICAL[3]


def test_fifo_takes_those_that_waited_longest() -> None:
    rows = [(number, 0, 1.0, "task") for number in (1, 2, 3, 4)]
    found = ReplayCandidates.of(
        rows, [(1, 1, None), (2, 1, None), (3, 2, None), (4, 2, None), (1, 3, None), (4, 4, None)]
    )
    assert choose_replayed(found, ReplayConfig(groups=3, order="fifo"), step=9, version=9, seed=0) == [2, 3, 1]


def test_advantage_is_the_last_one_noted_else_the_one_given() -> None:
    rows = [(1, 0, 5.0, "a"), (2, 0, 0.0, "b"), (3, 0, 0.0, "c")]
    found = ReplayCandidates.of(rows, [(1, 1, 0.5), (2, 1, 0.0), (2, 2, 3.0), (1, 3, 0.0), (3, 3, None), (2, 4, None)])
    assert found.noted.tolist()[:2] == [0.0, 3.0]
    given_rule = ReplayConfig(groups=3, order="priority")
    noted_rule = ReplayConfig(groups=3, order="priority", priority="advantage")
    assert choose_replayed(found, given_rule, step=9, version=9, seed=0) == [1]
    assert choose_replayed(found, noted_rule, step=9, version=9, seed=0) == [2]


def of_domains(**counts: int) -> ReplayCandidates:
    """Groups of domains, which arrive mixed; one use each, in step 1."""
    tasks = sorted(f"{name}/{place}" for name, count in counts.items() for place in range(count))
    np.random.default_rng(0).shuffle(tasks)
    rows = [(number, 0, 1.0, task) for number, task in enumerate(tasks, 1)]
    return ReplayCandidates.of(rows, [(row[0], 1, None) for row in rows])


def replayed(found: ReplayCandidates, rule: ReplayConfig, shares: dict[str, float], steps: int) -> list[Counter[str]]:
    """Replayed groups of each step by domain."""
    chosen = [choose_replayed(found, rule, step=step, version=0, seed=3, shares=shares) for step in range(2, steps + 2)]
    names = dict(zip(found.number.tolist(), (task.partition("/")[0] for task in found.task_id), strict=True))
    return [Counter(names[number] for number in each) for each in chosen]


@pytest.mark.parametrize("order", ["fifo", "uniform", "priority"])
def test_domains_are_replayed_by_their_shares(order: str) -> None:
    found = of_domains(math=40, code=40, school=30, art=10)
    rule = ReplayConfig.model_validate({"groups": 8, "order": order})
    steps = replayed(found, rule, {"math": 0.3, "code": 0.0}, 400)
    assert all(each.total() == 8 and each["code"] == 0 and each["math"] in (2, 3) for each in steps)
    assert sum(each["math"] for each in steps) / 400 == pytest.approx(2.4, abs=0.1)
    rest = sum(each["school"] for each in steps) / sum(each["school"] + each["art"] for each in steps)
    if order != "fifo":  # in proportion to what is stored
        assert rest == pytest.approx(0.75, abs=0.02)


def test_a_domain_without_enough_groups_leaves_its_places_empty() -> None:
    found = of_domains(math=1, code=40)
    assert replayed(found, ReplayConfig(groups=8), {"math": 0.5, "code": 0.5}, 3) == [Counter(math=1, code=4)] * 3


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1), min_size=1).map(
        lambda found: {name: share / max(1.0, sum(found.values())) for name, share in found.items()}
    ),
    st.integers(1, 40),
    st.integers(1, 10**6),
    st.integers(0, 2**64 - 1),
)
def test_quotas_are_shares_within_one_whatever_their_order(
    shares: dict[str, float], groups: int, step: int, seed: int
) -> None:
    found = replay_quotas(shares, groups, step=step, seed=seed)
    assert sum(found.values()) == groups
    assert all(abs(found[name] - groups * share) < 1 + 1e-6 for name, share in shares.items())
    assert found == replay_quotas(dict(reversed(shares.items())), groups, step=step, seed=seed)


histories = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), max_size=40)


@given(
    histories,
    st.lists(st.integers(-1, 9), min_size=12, max_size=12),
    st.builds(
        ReplayConfig,
        groups=st.integers(1, 14),
        order=st.sampled_from(["fifo", "uniform", "priority"]),
        max_age=st.none() | st.integers(0, 9),
        max_uses=st.none() | st.integers(2, 4),
        cooldown=st.integers(1, 5),
    ),
    st.integers(0, 2**64 - 1),
)
def test_bounds_hold_and_the_choice_repeats(
    uses: list[tuple[int, int]], versions: list[int], rule: ReplayConfig, seed: int
) -> None:
    uses = sorted({*uses, *((number, 1) for number in range(1, 13))}, key=lambda use: use[1])
    rows = [(number, version, 1.0, "task") for number, version in enumerate(versions, 1)]
    found = ReplayCandidates.of(rows, [(number, step, None) for number, step in uses])
    chosen = choose_replayed(found, rule, step=10, version=9, seed=seed)
    assert chosen == choose_replayed(found, rule, step=10, version=9, seed=seed)

    def may(number: int) -> bool:
        steps = [step for which, step in uses if which == number]
        version = versions[number - 1]
        young = rule.max_age is None or version < 0 or 9 - version <= rule.max_age
        return 10 - max(steps) >= rule.cooldown and len(steps) < (rule.max_uses or 99) and young

    allowed = [number for number in range(1, 13) if may(number)]
    assert len(set(chosen)) == len(chosen) == min(rule.groups, len(allowed))
    assert set(chosen) <= set(allowed)


def test_the_mean_advantage_counts_action_tokens_of_the_whole_group() -> None:
    one, other = experience("g/0", tokens=4), experience("g/1", tokens=6)
    one.advantage = np.array([9, 9, 1, -3], np.float32)
    other.advantage = np.array([9, 9, 1, 1, 1, 1], np.float32)
    assert mean_abs_advantage(Group("g", [one, other])) == 8 / 6
    assert mean_abs_advantage(group("g")) == 0.0


def test_segments_are_stretches_of_one_version() -> None:
    stitched = experience(tokens=9)
    stitched.versions[:] = [-1, -1, 3, 3, 4, -1, 4, 4, 5]
    stitched.action_mask[:] = [0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert version_segments(stitched) == [
        VersionSegment(2, 4, 3),
        VersionSegment(4, 5, 4),
        VersionSegment(6, 8, 4),
        VersionSegment(8, 9, 5),
    ]
    stitched.action_mask[:] = False
    assert version_segments(stitched) == []
