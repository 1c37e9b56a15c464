from __future__ import annotations

import json
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.run_factory import rollouts

from rollmill.errors import ConfigError, RollmillError
from rollmill.trackers import RolloutLog, iter_experiences, load_experiences, stored_steps
from rollmill.trackers.rollout_log import decode_experience, encode_experience
from rollmill.types import Experience, ExperienceSource, StopReason, Turn

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    length = draw(st.integers(0, 12))
    ints = hnp.arrays(np.int32, length)
    floats = hnp.arrays(np.float32, length, elements=st.floats(width=32))
    return Experience(
        id=draw(st.text()),
        task_id=draw(st.text()),
        group=draw(st.text()),
        token_ids=draw(ints),
        action_mask=draw(hnp.arrays(np.bool_, length)),
        logprobs=draw(floats),
        versions=draw(ints),
        reward=draw(st.none() | st.floats()),
        reward_parts=draw(st.dictionaries(st.text(), st.none() | st.floats(), max_size=3)),
        source=draw(st.sampled_from(ExperienceSource)),
        stop_reason=draw(st.sampled_from(StopReason)),
        temperature=draw(finite),
        turns=draw(st.lists(st.builds(Turn, st.text(), st.integers(), st.integers(), st.text()), max_size=3)),
        prompt=draw(st.text(st.characters(exclude_categories=[]))),  # lone surrogates too
        response=draw(st.text(st.characters(exclude_categories=[]))),
        timings=draw(st.dictionaries(st.text(), finite, max_size=3)),
        info=draw(st.dictionaries(st.text(), json_values, max_size=3)),
        role=draw(st.none() | st.text()),
        episode=draw(st.none() | st.text()),
        anchor=draw(st.none() | st.text()),
        step_reward=draw(st.none() | st.floats()),
        greedy_reward=draw(st.none() | st.floats()),
        rejected=draw(st.none() | st.text()),
        advantage=draw(st.none() | floats),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == np.float32) and _signs(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(type(a) is type(b) and (a == b or (a != a and b != b)))


def _signs(a: Any, b: Any) -> bool:
    return a.dtype != np.float32 or bool(np.array_equal(np.signbit(a[a == a]), np.signbit(b[b == b])))


def assert_same(a: Experience, b: Experience) -> None:
    for field in fields(Experience):
        assert same(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.mark.slow
@given(experiences())
@settings(max_examples=150, deadline=None)
def test_an_experience_survives_the_round_trip_exactly(experience: Experience) -> None:
    line = json.dumps(encode_experience(experience), allow_nan=False)
    assert_same(experience, decode_experience(json.loads(line)))


def test_every_kind_of_float32_comes_back_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = np.array([0, 1, 0x80000000, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    values = values[~np.isnan(values)]
    (experience,) = rollouts(rng, 1, tasks=1, group=1)
    experience.logprobs = values
    back = decode_experience(json.loads(json.dumps(encode_experience(experience))))
    assert np.array_equal(back.logprobs.view(np.uint32), values.view(np.uint32))


def test_the_store_reads_back_what_it_wrote_by_step_and_by_task(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    store = RolloutLog(tmp_path / "rollouts")
    written = {step: rollouts(rng, step) for step in (2, 12, 100)}
    for step, some in written.items():
        store.write(step, some)
    assert stored_steps(tmp_path) == [2, 12, 100]
    assert (tmp_path / "rollouts" / "step-000012.jsonl").is_file()
    for loaded, original in zip(load_experiences(tmp_path), chain(*written.values()), strict=True):
        assert_same(original, loaded)
    assert [one.id for one in load_experiences(str(tmp_path), step=12)] == [one.id for one in written[12]]
    task = written[100][4].task_id
    assert [one.id for one in iter_experiences(tmp_path, task=task)] == [f"{task}/{i}" for i in range(3)]
    assert load_experiences(tmp_path, task="no such task") == []


def test_what_the_trainer_knows_of_tokens_is_stored_for_looking_at(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts")
    one = rollouts(np.random.default_rng(0), 1)[0]
    count = len(one.token_ids)
    one.trainer_logprobs = np.linspace(-1.2345678, 0, count, dtype=np.float32)
    one.entropy = np.array([np.inf, *[1.23456] * (count - 1)], np.float32)
    log.write(1, [one])
    log.write(2, [one], details=False)
    [stored], [without] = (load_experiences(tmp_path, step) for step in (1, 2))
    assert stored.trainer_logprobs == pytest.approx(one.trainer_logprobs, rel=6e-8)
    assert stored.entropy.tolist() == [np.inf, *[np.float32(1.2346)] * (count - 1)]
    assert (without.trainer_logprobs, without.entropy) == (None, None)
    assert encode_experience(stored) == encode_experience(one)


def test_dropping_later_steps_leaves_the_others(tmp_path: Path) -> None:
    store = RolloutLog(tmp_path / "rollouts")
    store.drop_after(0)
    for step in range(1, 5):
        store.write(step, [])
    store.drop_after(2)
    assert stored_steps(tmp_path) == [1, 2]


def test_info_that_json_has_no_notion_of_is_stored_as_its_repr() -> None:
    (experience,) = rollouts(np.random.default_rng(0), 1, tasks=1, group=1)
    experience.info = {
        "scale": np.float32(0.5),
        "ids": np.arange(3),
        "kind": StopReason.STOP,
        7: {1},
        "x": object,
        "n": 1e999,
    }
    back = decode_experience(json.loads(json.dumps(encode_experience(experience), allow_nan=False)))
    assert back.info == {
        "scale": 0.5,
        "ids": [0, 1, 2],
        "kind": "stop",
        "7": [1],
        "x": "<class 'object'>",
        "n": "inf",
    }


def test_errors_name_the_step_the_run_and_the_line(tmp_path: Path) -> None:
    store = RolloutLog(tmp_path / "runs" / "first" / "rollouts")
    path = store.write(3, rollouts(np.random.default_rng(0), 3))
    store.write(7, [])
    run = tmp_path / "runs" / "first"
    with pytest.raises(
        ConfigError, match=r"stores no experiences of step 6\. Stored: 2 steps from 3 to 7; nearest 3, 7"
    ):
        load_experiences(run, step=6)
    with pytest.raises(ConfigError, match=r"frist is no folder\. Runs found there: .*runs/first"):
        load_experiences(tmp_path / "runs" / "frist")
    with pytest.raises(ConfigError, match=r"runs holds no run .*Runs found there: .*runs/first"):
        load_experiences(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"is no folder\. Check the path"):
        load_experiences(tmp_path / "elsewhere" / "run")
    path.write_text(path.read_text() + '{"step": 3, "task_id": "x"}\n')
    with pytest.raises(RollmillError, match=r"step-000003\.jsonl:13 is not a stored experience"):
        load_experiences(run)
