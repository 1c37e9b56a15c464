"""What holds for every operator, whatever a policy writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_up import context, ids, pipeline, plain, rollout

from rollmill.config.components import OperatorConfig
from rollmill.config.validation_errors import section_classes
from rollmill.pipelines import OperatorReport, Pipeline
from rollmill.types import Experience, ExperienceSource, StopReason

EXACT = {"name": "exact", "after": "is"}
OPERATORS: list[dict[str, Any]] = [
    {"name": "reward_filter", "at_least": 0.3, "at_most": 0.9},
    {"name": "length_filter", "at_least": 3, "at_most": 30},
    {"name": "group_variance", "at_least": 0.1},
    {"name": "invalid_reward"},
    {"name": "truncated"},
    {"name": "truncated", "then": "reward"},
    {"name": "check", "reward": {"name": "format", "pattern": "is"}},
    {"name": "verify", "rewards": [EXACT], "share": 0.5},
    {"name": "verify", "rewards": [EXACT], "part": "exact", "otherwise": "drop"},
    {"name": "duplicates", "within": "run", "memory": 3},
    {"name": "near_duplicates", "within": "task", "memory": 3, "permutations": 16},
    {"name": "length_reward", "threshold": 0.5},
    {"name": "overlong_penalty", "longest": 20},
    {"name": "repetition_penalty", "ngram": 2},
    {"name": "diversity", "threshold": 0.5},
    {"name": "scale", "factor": -2.0, "clip": [-1, 0]},
    {"name": "priority"},
    {"name": "success_rate"},
    {"name": "demonstrations", "per_task": 1, "threshold": 0.5},
    {"name": "pairs", "count": 2},
    {"name": "pairs", "by": "length", "threshold": 0.5, "count": 2},
    {"name": "reflection"},
]
HOSTILE = [
    "",
    " ",
    "it is 12",
    "\0\x1b[31m",
    "\udcff\ud800",
    "<think>" * 40,
    "{" * 300,
    "é\u0301\u202e",
    "答案是12",
    "x" * 4000,
]
REWARDS = [None, 0.0, 0.5, 1.0, float("nan"), float("inf")]


@st.composite
def groups(draw: st.DrawFn) -> list[list[Experience]]:
    """A few groups of rollouts: any reward, any text, cut off or not, some tasks more than once."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        members = [
            rollout(
                draw(st.sampled_from(REWARDS)),
                index=index,
                group=f"g{number}",
                task=f"t{draw(st.integers(0, 1))}" if not index else found_task,
                text=draw(st.sampled_from(HOSTILE)),
                stop=draw(st.sampled_from([StopReason.EOS, StopReason.STOP, StopReason.LENGTH])),
                outcomes={"exact": draw(st.sampled_from(["ok", "ok", "timeout"]))},
            )
            for found_task in [f"t{number % 2}"]
            for index in range(draw(st.integers(1, 4)))
        ]
        for each in members:
            each.task_id = members[0].task_id
        found.append(members)
    return found


def run(made: Pipeline, members: list[Experience]) -> list[Experience]:
    return asyncio.run(made.process(members, context()))


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in options.items() if isinstance(value, str))


def test_every_built_in_operator_is_here() -> None:
    listed = {options["name"] for options in OPERATORS}
    known = {str(section.model_fields["name"].default) for section in section_classes(OperatorConfig)}
    assert known - listed == {"test_cases", "data_juicer"}  # they have sandboxes and packages of their own


@pytest.mark.parametrize("options", OPERATORS, ids=name_of)
@settings(max_examples=25)
@given(batches=groups())
def test_nothing_is_lost_doubled_or_rewritten(options: dict[str, Any], batches: list[list[Experience]]) -> None:
    made = pipeline(options)
    for members in batches:
        before = {each.id: deepcopy(each) for each in members}
        found = run(made, members)
        [report] = made.take_reports().values()
        check_report(report, before, found)
        for each in found:
            if each.id in before:
                check_kept(each, before[each.id])
            else:
                check_added(each)
    made.close()


def check_report(report: OperatorReport, before: dict[str, Experience], found: Sequence[Experience]) -> None:
    kept = [each for each in found if each.id in before]
    assert report.seen == len(before) == report.kept + report.dropped
    assert report.kept == len(kept)
    assert report.added == len(found) - len(kept)
    assert sum(report.reasons.values()) == report.dropped
    assert [each.id for each in kept] == [name for name in before if name in set(ids(kept))]  # in the order they came
    assert len(set(ids(found))) == len(found)


def check_kept(after: Experience, before: Experience) -> None:
    """The tokens and the text are as they were; a mask hides all or nothing."""
    assert np.array_equal(after.token_ids, before.token_ids)
    assert (after.response, after.prompt, after.turns) == (before.response, before.prompt, before.turns)
    assert (after.group, after.task_id, after.source) == (before.group, before.task_id, before.source)
    if after.action_tokens:
        for name in ("action_mask", "logprobs", "versions"):
            assert np.array_equal(getattr(after, name), getattr(before, name))
    if after.reward != before.reward and not (after.reward is None or np.isnan(after.reward)):
        assert "raw_reward" in after.info


def check_added(made: Experience) -> None:
    assert made.source in (ExperienceSource.EXPERT, ExperienceSource.PREFERENCE)
    shapes = {array.shape for array in (made.token_ids, made.action_mask, made.logprobs, made.versions)}
    assert shapes == {(len(made.token_ids),)}
    assert made.action_tokens
    assert not made.logprobs.any()
    assert (made.versions == -1).all()
    assert made.info["origin"]


@settings(max_examples=25)
@given(batches=groups(), chosen=st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=5), data=st.data())
def test_a_pipeline_resumed_in_the_middle_goes_on_the_same(
    batches: list[list[Experience]], chosen: list[dict[str, Any]], data: Any
) -> None:
    whole = pipeline(*chosen)
    expected = [plain(run(whole, members)) for members in deepcopy(batches)]
    cut = data.draw(st.integers(0, len(batches)))
    first = pipeline(*chosen)
    found = [plain(run(first, members)) for members in deepcopy(batches[:cut])]
    second = pipeline(*chosen)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [plain(run(second, members)) for members in deepcopy(batches[cut:])]
    assert found == expected
    assert second.state_dict() == whole.state_dict()
    for made in (whole, first, second):
        made.close()
