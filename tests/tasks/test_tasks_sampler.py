"""The order of tasks: every task once per epoch, and a state that goes on exactly."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.core.errors import TasksetError
from rollmill.core.types import Task
from rollmill.tasks import Sampler, Taskset

Order = Literal["shuffled", "sequential"]
orders: st.SearchStrategy[Order] = st.sampled_from(["shuffled", "sequential"])


def taskset_of(size: int, answer: Any = None, rejected: str | None = None) -> Taskset:
    return Taskset("t", [Task(f"t:{i}", f"{i}?", answer, rejected=rejected) for i in range(size)], [])


def ids(sampler: Sampler, count: int) -> list[str]:
    return [sampler.next().id for _ in range(count)]


@given(st.integers(1, 30), orders, st.integers(), st.integers(1, 4))
def test_every_task_comes_once_per_epoch(size: int, order: Order, seed: int, epochs: int) -> None:
    taskset = taskset_of(size)
    sampler = Sampler(taskset, order, seed)
    for epoch in range(epochs):
        seen = ids(sampler, size)
        assert sampler.epoch == epoch
        assert sorted(seen) == sorted(task.id for task in taskset.tasks)
        if order == "sequential":
            assert seen == [task.id for task in taskset.tasks]


@given(st.integers(1, 12), orders, st.integers(0, 9), st.integers(0, 40), st.integers(1, 30))
def test_a_state_goes_on_exactly(size: int, order: Order, seed: int, done: int, more: int) -> None:
    sampler = Sampler(taskset_of(size), order, seed)
    ids(sampler, done)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = Sampler(taskset_of(size), order, seed)
    resumed.load_state_dict(state)
    assert ids(resumed, more) == ids(sampler, more)
    assert resumed.state_dict() == sampler.state_dict()


def test_seeds_and_epochs_shuffle_differently() -> None:
    first = Sampler(taskset_of(20), "shuffled", 0)
    one, two = ids(first, 20), ids(first, 20)
    other = ids(Sampler(taskset_of(20), "shuffled", 1), 20)
    assert len({tuple(one), tuple(two), tuple(other)}) == 3
    assert ids(Sampler(taskset_of(20), "shuffled", 0), 20) == one


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Sampler(taskset_of(5), "shuffled", 0), r"taskset t changed since the checkpoint \(size was 4, is 5\)"),
        (Sampler(taskset_of(4, answer="x"), "shuffled", 0), "fingerprint was"),
        (Sampler(taskset_of(4, rejected="x"), "shuffled", 0), "fingerprint was"),
        (Sampler(taskset_of(4), "sequential", 0), "order was shuffled, is sequential"),
        (Sampler(taskset_of(4), "shuffled", 1), "seed was 0, is 1"),
    ],
)
def test_a_state_of_something_else_is_refused(other: Sampler, message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        other.load_state_dict(Sampler(taskset_of(4), "shuffled", 0).state_dict())


def test_the_fingerprint_sees_all_of_an_answer() -> None:
    answers = [["5", "10"], ["5", "11"], ["10", "5"], {"1": "A"}, {"1": "B"}, [{"a": 1}], [{"a": 2}], "5", 5, None]
    found = [taskset_of(2, answer).fingerprint() for answer in answers]
    assert len(set(found)) == len(answers)
    assert found == [taskset_of(2, answer).fingerprint() for answer in answers]
    assert taskset_of(2, [object()]).fingerprint() == taskset_of(2, [object()]).fingerprint()  # no address in it
    taskset_of(1, {(1, 2): "A"}).fingerprint()
