"""The order of tasks: every task once per epoch, and a state that goes on exactly."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.taskset import TasksetConfig
from rollmill.data import Sampler, Taskset, build_sampler
from rollmill.errors import TasksetError
from rollmill.types import Task

Name = Literal["shuffled", "sequential"]
names: st.SearchStrategy[Name] = st.sampled_from(["shuffled", "sequential"])


def taskset_of(size: int, answer: Any = None, rejected: str | None = None) -> Taskset:
    return Taskset("t", [Task(f"t:{i}", f"{i}?", answer, rejected=rejected) for i in range(size)], [])


def sampler_of(taskset: Taskset, name: Name, seed: int) -> Sampler:
    return build_sampler(taskset, TasksetConfig.model_validate({"path": "x", "sampler": name}).sampler, seed, batch=4)


def ids(sampler: Sampler, count: int) -> list[str]:
    return [sampler.next().id for _ in range(count)]


@given(st.integers(1, 30), names, st.integers(), st.integers(1, 4))
def test_every_task_comes_once_per_epoch(size: int, name: Name, seed: int, epochs: int) -> None:
    taskset = taskset_of(size)
    sampler = sampler_of(taskset, name, seed)
    for epoch in range(epochs):
        seen = ids(sampler, size)
        assert sampler.epoch == epoch
        assert sorted(seen) == sorted(task.id for task in taskset.tasks)
        if name == "sequential":
            assert seen == [task.id for task in taskset.tasks]


@given(st.integers(1, 12), names, st.integers(0, 9), st.integers(0, 40), st.integers(1, 30))
def test_a_state_goes_on_exactly(size: int, name: Name, seed: int, done: int, more: int) -> None:
    sampler = sampler_of(taskset_of(size), name, seed)
    ids(sampler, done)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = sampler_of(taskset_of(size), name, seed)
    resumed.load_state_dict(state)
    assert ids(resumed, more) == ids(sampler, more)
    assert resumed.state_dict() == sampler.state_dict()


def test_orders_and_states_are_those_of_the_first_release() -> None:
    """Golden trajectories and checkpoints depend on them."""
    sampler = sampler_of(taskset_of(5), "shuffled", 7)
    assert ids(sampler, 12) == [f"t:{i}" for i in (4, 2, 1, 3, 0, 2, 1, 3, 4, 0, 0, 3)]
    state = {"epoch": 2, "cursor": 2, "size": 5, "fingerprint": "64bab9c4e7185629", "order": "shuffled", "seed": 7}
    assert sampler.state_dict() == state
    assert sampler.metrics() == {}


def test_seeds_and_epochs_shuffle_differently() -> None:
    first = sampler_of(taskset_of(20), "shuffled", 0)
    one, two = ids(first, 20), ids(first, 20)
    other = ids(sampler_of(taskset_of(20), "shuffled", 1), 20)
    assert len({tuple(one), tuple(two), tuple(other)}) == 3
    assert ids(sampler_of(taskset_of(20), "shuffled", 0), 20) == one


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampler_of(taskset_of(5), "shuffled", 0), r"taskset t changed since the checkpoint \(size was 4, is 5\)"),
        (sampler_of(taskset_of(4, answer="x"), "shuffled", 0), "fingerprint was"),
        (sampler_of(taskset_of(4, rejected="x"), "shuffled", 0), "fingerprint was"),
        (sampler_of(taskset_of(4), "sequential", 0), "sampler was shuffled, is sequential"),
        (sampler_of(taskset_of(4), "shuffled", 1), "seed was 0, is 1"),
    ],
)
def test_a_state_of_something_else_is_refused(other: Sampler, message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        other.load_state_dict(sampler_of(taskset_of(4), "shuffled", 0).state_dict())


def test_the_fingerprint_sees_all_of_an_answer() -> None:
    answers = [["5", "10"], ["5", "11"], ["10", "5"], {"1": "A"}, {"1": "B"}, [{"a": 1}], [{"a": 2}], "5", 5, None]
    found = [taskset_of(2, answer).fingerprint() for answer in answers]
    assert len(set(found)) == len(answers)
    assert found == [taskset_of(2, answer).fingerprint() for answer in answers]
    assert taskset_of(2, [object()]).fingerprint() == taskset_of(2, [object()]).fingerprint()  # no address in it
    taskset_of(1, {(1, 2): "A"}).fingerprint()
