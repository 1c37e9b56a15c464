"""Filters, dynamic sampling, invalid rewards and truncated completions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.made_up import group, ids, process, rewards, rollout

from rollmill.types import Experience, StopReason


@pytest.mark.parametrize(
    ("options", "kept", "reasons"),
    [
        ({"at_least": 0.5}, [1, 2, 3], {"reward too low": 1}),
        ({"at_most": 0.5}, [0, 1, 3], {"reward too high": 1}),
        ({"at_least": 0.2, "at_most": 0.7}, [1, 3], {"reward too low": 1, "reward too high": 1}),
        ({"at_least": 2, "part": "style"}, [0], {"reward too low": 3}),
    ],
)
def test_reward_filter(options: dict[str, Any], kept: list[int], reasons: dict[str, int]) -> None:
    parts = [{"style": value} for value in (2.0, 1.0, 0.0, -1.0)]
    found, report = process({"name": "reward_filter", **options}, group([0.0, 0.5, 1.0, None], parts=parts))
    assert ids(found) == [f"g0/{index}" for index in kept]
    assert report.reasons == reasons


def test_length_filter_counts_the_tokens_of_the_policy() -> None:
    experiences = group([1.0] * 4, length=[3, 4, 8, 9])
    found, report = process({"name": "length_filter", "at_least": 4, "at_most": 8}, experiences)
    assert ids(found) == ["g0/1", "g0/2"]
    assert report.reasons == {"too short": 1, "too long": 1}


@pytest.mark.parametrize(
    ("options", "values", "why"),
    [
        ({}, [1.0, 1.0, 1.0], "all equal"),
        ({}, [0.0, 0.0], "all equal"),
        ({}, [0.1 + 0.2, 0.3], "all equal"),  # but for rounding
        ({}, [1.0], "all equal"),
        ({}, [None, 1.0], "all equal"),
        ({}, [None, None], "not judged"),
        ({}, [1.0, 0.0], None),
        ({"std_above": 0.4}, [0.5, 1.0], "too alike"),  # deviation .25
        ({"std_above": 0.4}, [0.0, 1.0], None),
        ({"at_least": 0.25}, [1.0, 0, 0, 0], None),
        ({"at_least": 0.26}, [1.0, 0, 0, 0], "mean too low"),
        ({"at_most": 0.75}, [1.0, 1, 1, 0], None),
        ({"at_most": 0.74}, [1.0, 1, 1, 0], "mean too high"),
        ({"threshold": 1.0}, [0.2, 0.9], "all equal"),  # no success at all
        ({"threshold": 0.5}, [0.2, 0.9], None),
    ],
)
def test_group_variance_keeps_or_drops_whole_groups(
    options: dict[str, Any], values: list[float | None], why: str | None
) -> None:
    found, report = process({"name": "group_variance", **options}, group(values))
    assert len(found) == (len(values) if why is None else 0)
    assert report.reasons == ({} if why is None else {why: len(values)})


def test_group_variance_of_a_part_does_not_see_the_rest_of_the_reward() -> None:
    shaped = group([1.0, 0.7], parts=[{"math": 1.0}, {"math": 1.0}])
    assert process({"name": "group_variance", "part": "math"}, shaped)[0] == []
    assert len(process("group_variance", shaped)[0]) == 2


def test_a_closed_gate_is_a_failure_of_the_part_behind_it() -> None:
    experiences = [
        rollout(1.0, index=0, parts={"math": 1.0}),
        rollout(0.0, index=1, parts={"format": 0.0}, outcomes={"format": "ok", "math": "gated"}),
    ]
    options = {"name": "group_variance", "part": "math", "threshold": 1.0}
    assert len(process(options, experiences)[0]) == 2


def test_invalid_rewards_go() -> None:
    experiences = group([1.0, None, math.nan, math.inf, 0.0, 0.0])
    experiences[4].info["outcomes"] = {"math": "timeout"}
    experiences[5].info["outcomes"] = {"math": "unparsable"}
    found, report = process("invalid_reward", experiences)
    assert ids(found) == ["g0/0", "g0/5"]
    assert report.reasons == {"no reward": 1, "not finite": 2, "unwanted outcome": 1}
    found, _ = process({"name": "invalid_reward", "outcomes": ["unparsable"]}, experiences)
    assert ids(found) == ["g0/0", "g0/4"]


def cut_off() -> list[Experience]:
    return group([1.0, 1.0, 0.0], stop=[StopReason.EOS, StopReason.LENGTH, StopReason.LENGTH])


def test_truncated_completions_are_masked_and_still_in_the_baseline() -> None:
    tokens = [each.token_ids.copy() for each in cut_off()]
    found, report = process("truncated", cut_off())
    assert [each.action_tokens > 0 for each in found] == [True, False, False]
    assert rewards(found) == [1.0, 1.0, 0.0]
    assert all(np.array_equal(each.token_ids, before) for each, before in zip(found, tokens, strict=True))
    assert not found[1].logprobs.any()
    assert (found[1].versions == -1).all()
    assert found[1].info["masked"] == 3
    assert "masked" not in found[0].info
    assert (report.changed, report.changes) == (2, {"masked": 2})


def test_truncated_completions_are_dropped_or_earn_a_fixed_reward() -> None:
    found, report = process({"name": "truncated", "then": "drop"}, cut_off())
    assert (ids(found), report.reasons) == (["g0/0"], {"cut off": 2})
    found, report = process({"name": "truncated", "then": "reward", "reward": -0.5}, cut_off())
    assert rewards(found) == [1.0, -0.5, -0.5]
    assert [each.reward_parts["pipeline/truncated"] for each in found] == [0.0, -1.5, -0.5]
    assert [each.info.get("raw_reward") for each in found] == [None, 1.0, 0.0]
    assert report.changes == {"cut off reward": 2}


def test_a_masked_completion_keeps_its_length() -> None:
    found, _ = process(
        ["truncated", {"name": "length_filter", "at_most": 4}], group([1.0], length=5, stop=StopReason.LENGTH)
    )
    assert found == []


def test_group_variance_looks_at_each_role_by_itself() -> None:
    """White always wins, so that only the mix of both players' rewards has a spread; the judges differ."""
    played = group([1.0, 0.0, 1.0, 0.0, 0.5, 1.0])
    for experience, role in zip(played, ["white", "black", "white", "black", "judge", "judge"], strict=True):
        experience.role = role
    found, report = process("group_variance", played)
    assert ids(found) == ["g0/4", "g0/5"]
    assert report.reasons == {"all equal": 4}
