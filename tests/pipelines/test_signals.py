"""What other components are told: priorities and success rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.made_up import group, process, rewards, rollout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"by": "variance"}, 0.1875),  # p = 1/4
        ({"by": "balance"}, 0.5),
        ({"by": "reward"}, 0.25),
        ({"by": "failure"}, 0.75),
        ({"by": "length"}, 0.25),  # 25 of 100 tokens
        ({"by": "recency"}, 8.0),
        ({"by": "failure", "threshold": 2.0}, 1.0),
        ({"by": "reward", "threshold": 2.0}, 0.01),  # the floor
        ({"by": "reward", "threshold": 2.0, "floor": 0.0}, 0.0),
        ({"by": "reward", "part": "style"}, 0.5),
    ],
)
def test_priorities(options: dict[str, Any], expected: float) -> None:
    parts: list[dict[str, float | None]] = [{"style": value} for value in (1.0, 0.0, 1.0, 0.0)]
    experiences = group([1.0, 0.0, 0.0, 0.0], parts=parts, length=[10, 20, 30, 40])
    found, report = process({"name": "priority", **options}, experiences)
    assert [each.info["priority"] for each in found] == pytest.approx([expected] * 4)
    assert (report.changed, report.changes) == (0, {"set": 1})


def test_a_group_without_rewards_has_the_least_priority() -> None:
    found, _ = process("priority", group([None, None]))
    assert [each.info["priority"] for each in found] == [0.01, 0.01]


def test_a_rollout_that_forked_counts_once() -> None:
    """One success of three branches, one failure: half of the rollouts succeeded."""
    told: list[list[float]] = []
    experiences = group([1.0, 1.0, 1.0, 0.0])
    for each in experiences[:3]:
        each.episode = "g0/0"
    process("success_rate", experiences, observe=lambda task, successes: told.append(list(successes)))
    assert told == [[1.0, 0.0]]
    found, _ = process({"name": "priority", "by": "reward"}, experiences)
    assert {each.info["priority"] for each in found} == {0.5}
    kept, _ = process({"name": "group_variance", "at_most": 0.6}, experiences)
    assert len(kept) == 4


def test_the_sampler_is_told_successes() -> None:
    told: list[tuple[str, list[float]]] = []

    def observe(task: str, successes: Sequence[float]) -> None:
        told.append((task, list(successes)))

    experiences = group([1.0, 0.4, None, 0.6], task="t3")
    found, report = process({"name": "success_rate", "threshold": 0.5}, experiences, observe=observe)
    assert told == [("t3", [1.0, 0.0, 1.0])]
    assert (len(found), rewards(found), report.changes) == (4, [1.0, 0.4, None, 0.6], {"observed": 1})
    gated = rollout(-1.0, parts={"format": 0.0}, outcomes={"format": "ok", "math": "gated"})
    process({"name": "success_rate", "part": "math"}, [gated], observe=observe)
    assert told[1] == ("t0", [0.0])
    process("success_rate", group([None]), observe=observe)
    assert len(told) == 2
