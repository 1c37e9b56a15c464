"""Orders that go by difficulty or success: their chances, and states that go on exactly."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import rollmill
from rollmill.config import section as parts
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Sampler, Taskset, build_sampler
from rollmill.data.samplers import TaskView
from rollmill.errors import TasksetError
from rollmill.types import Task

KNOWN = {"discount": 1.0, "prior_weight": 1e-9}
"""Tracking that says exactly what was seen."""


def taskset_of(size: int, **columns: list[Any]) -> Taskset:
    rows = [{name: values[number] for name, values in columns.items()} for number in range(size)]
    return Taskset("t", [Task(f"t:{number}", f"{number}?", metadata=row) for number, row in enumerate(rows)], [])


def sampler_of(taskset: Taskset, section: Any, seed: int = 0, batch: int = 1) -> Sampler:
    return build_sampler(
        taskset, TasksetConfig.model_validate({"path": "x", "sampler": section}).sampler, seed, batch=batch
    )


def numbers(sampler: Sampler, count: int, step: int = 0) -> list[int]:
    return [int(sampler.next(step).id.partition(":")[2]) for _ in range(count)]


def see(sampler: Sampler, rates: list[float], completions: int = 10) -> None:
    """Tell the sampler a group of each task with these success rates."""
    for number, rate in enumerate(rates):
        right = round(rate * completions)
        sampler.observe(f"t:{number}", [1.0] * right + [0.0] * (completions - right))


def chi_square(counts: list[int], chances: list[float]) -> float:
    expected = np.array(chances) / sum(chances) * sum(counts)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


# -- prioritised ---------------------------------------------------------------------------------------------------


def test_prioritised_draws_in_proportion_to_one_minus_the_success_rate() -> None:
    """Kimi k1.5: P(i) proportional to 1 - s_i; the floor keeps solved tasks alive."""
    sampler = sampler_of(taskset_of(4), {"name": "prioritised", "floor": 0.1, **KNOWN})
    see(sampler, [0.9, 0.5, 0.0, 1.0])
    drawn = Counter(numbers(sampler, 8000))
    assert chi_square([drawn[i] for i in range(4)], [0.1, 0.5, 1.0, 0.1]) < 16.3  # 3 degrees of freedom, p = .001


def test_unseen_tasks_get_the_prior() -> None:
    sampler = sampler_of(taskset_of(3), {"name": "prioritised", "prior": 0.2, "floor": 0.01})
    drawn = Counter(numbers(sampler, 3000))
    assert chi_square([drawn[i] for i in range(3)], [1, 1, 1]) < 13.8
    sampler.observe("t:0", [1.0] * 998)  # rate (0.4 + 998) / 1000
    drawn = Counter(numbers(sampler, 6000))
    assert chi_square([drawn[i] for i in range(3)], [0.01, 0.8, 0.8]) < 13.8


def test_priors_may_come_from_a_column() -> None:
    taskset = taskset_of(3, success_rate=[0.5, "0.9", 1.0])
    sampler = sampler_of(taskset, {"name": "prioritised", "prior_column": "success_rate", "floor": 0.001})
    drawn = Counter(numbers(sampler, 6000))
    assert chi_square([drawn[i] for i in range(3)], [0.5, 0.1, 0.01]) < 13.8
    with pytest.raises(
        TasksetError, match=r"sampler.prior_column: 1 of 2 tasks have no number in the column rate \(fir"
    ):
        sampler_of(taskset_of(2, rate=[0.5, "high"]), {"name": "prioritised", "prior_column": "rate"})


def test_a_prior_that_is_no_rate_is_refused() -> None:
    tasks = taskset_of(2, percent=[20, 80])
    with pytest.raises(
        TasksetError, match=r"prior_column: success rates are from 0 to 1, and percent .* from 20 to 80"
    ):
        sampler_of(tasks, {"name": "prioritised", "prior_column": "percent"})


def test_a_column_may_have_any_name() -> None:
    """Of what a state holds, `epoch` is a number that a column of this name would have taken the place of."""
    section = {"name": "easy_to_hard", "column": "epoch"}
    sampler, again = (sampler_of(taskset_of(3, epoch=[3, 1, 2]), section) for _ in range(2))
    assert numbers(sampler, 4) == [1, 2, 0, 1]
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert (numbers(again, 2), again.epoch) == ([2, 0], 1)


def test_no_task_comes_twice_in_a_batch() -> None:
    sampler = sampler_of(taskset_of(10), {"name": "prioritised", **KNOWN}, batch=5)
    see(sampler, [1.0] * 9 + [0.0])
    for _ in range(20):
        batch = numbers(sampler, 5)
        assert len(set(batch)) == 5
        assert 9 in batch  # of weight 1; the others have .05
    assert sorted(numbers(sampler_of(taskset_of(3), "prioritised", batch=6), 6)) == [0, 0, 1, 1, 2, 2]


def test_success_is_a_discounted_mean_with_a_prior() -> None:
    sampler: Any = sampler_of(taskset_of(2), {"name": "prioritised", "discount": 0.5})
    sampler.observe("t:0", [1, 1, 1, 1, 1, 1, 0, 0])
    assert sampler._success.rates() == pytest.approx([0.7, 0.5])  # (1 + 6) / (2 + 8)
    sampler.observe("t:0", [0] * 8)
    assert sampler._success.rates()[0] == pytest.approx((1 + 3) / (2 + 3 + 1 + 8))
    assert sampler.metrics() == {
        "tasks/epoch": 0,
        "tasks/seen": 0.5,
        "tasks/success": pytest.approx(2 / 7),
    }
    sampler.observe("another:0", [1])  # of another taskset
    assert sampler.metrics()["tasks/seen"] == 0.5


# -- curriculum ----------------------------------------------------------------------------------------------------


def test_curriculum_warms_up_and_then_takes_hard_tasks_only() -> None:
    """Kimi k1.5: uniform warm-up, then only hard problems."""
    sampler = sampler_of(taskset_of(8), {"name": "curriculum", "warmup": 4, **KNOWN}, batch=4)
    warm = [numbers(sampler, 4, step) for step in range(4)]
    assert sorted(warm[0] + warm[1]) == sorted(warm[2] + warm[3]) == list(range(8))
    see(sampler, [1.0, 0.9, 0.6, 0.5, 0.4, 0.0, 1.0, 1.0])
    assert [sorted(numbers(sampler, 3, 4 + step)) for step in range(3)] == [[3, 4, 5]] * 3
    assert sampler.metrics()["tasks/hard"] == 3 / 8


def test_curriculum_drops_what_was_drawn_ahead_when_the_warm_up_ends() -> None:
    sampler = sampler_of(taskset_of(8), {"name": "curriculum", "warmup": 1, **KNOWN}, batch=6)
    see(sampler, [1.0] * 7 + [0.0])
    numbers(sampler, 2, 0)
    assert numbers(sampler, 6, 1) == [7] * 6  # fewer hard tasks than a batch has places


def test_curriculum_without_hard_tasks_takes_all() -> None:
    sampler = sampler_of(taskset_of(4), {"name": "curriculum", "warmup": 0, **KNOWN}, batch=4)
    see(sampler, [1.0, 0.9, 0.8, 0.7])
    assert sorted(numbers(sampler, 4)) == [0, 1, 2, 3]
    see(sampler, [0.0] * 4, completions=100)
    assert sampler.metrics()["tasks/hard"] == 1.0


def test_curriculum_by_difficulty_asks_for_no_success() -> None:
    section = {"name": "curriculum", "warmup": 1, "by": "difficulty", "bound": 3, "column": "level"}
    sampler = sampler_of(taskset_of(4, level=[1, "3", 2, 5.5]), section, batch=2)
    numbers(sampler, 2, 0)
    assert sorted(numbers(sampler, 2, 1)) == [1, 3]
    assert not sampler.uses_success


# -- posterior -----------------------------------------------------------------------------------------------------


def test_posterior_prefers_tasks_near_the_target() -> None:
    sampler = sampler_of(taskset_of(5), {"name": "posterior", "target": 0.5, "discount": 1.0}, batch=2)
    see(sampler, [0.0, 0.25, 0.5, 0.75, 1.0], completions=100)
    drawn = Counter(numbers(sampler, 600))
    assert drawn[2] == 300
    assert drawn[0] == drawn[4] == 0
    assert chi_square([drawn[1], drawn[3]], [1, 1]) < 10.8


def test_posterior_is_thompson_sampling() -> None:
    """Two tasks, one of them unseen (uniform posterior), one sharp at .5: the unseen one wins when its draw is nearer,
    which happens about as often as a uniform number is nearer to .5 than a draw of the sharp posterior."""
    sampler = sampler_of(taskset_of(2), {"name": "posterior", "discount": 1.0})
    sampler.observe("t:0", [1.0, 0.0] * 10)
    drawn = Counter(numbers(sampler, 4000))
    random_ = np.random.default_rng(1)
    wins = np.abs(random_.random(400_000) - 0.5) < np.abs(random_.beta(11, 11, 400_000) - 0.5)
    assert chi_square([drawn[1], drawn[0]], [wins.mean(), 1 - wins.mean()]) < 10.8


# -- easy to hard --------------------------------------------------------------------------------------------------


def test_easy_to_hard_sorts_each_epoch_and_shuffles_ties() -> None:
    sampler = sampler_of(taskset_of(40, difficulty=[3, 1] * 20), "easy_to_hard")
    first, second = numbers(sampler, 40), numbers(sampler, 40)
    for epoch in (first, second):
        assert sorted(epoch) == list(range(40))
        assert all(number % 2 == 1 for number in epoch[:20])
    assert first != second
    assert not sampler.uses_success


def test_easy_to_hard_by_success_follows_what_is_seen() -> None:
    sampler = sampler_of(taskset_of(4), {"name": "easy_to_hard", "by": "success"})
    numbers(sampler, 1)
    see(sampler, [0.0, 1.0, 0.3, 0.8])
    numbers(sampler, 3)  # the epoch goes on as it began
    assert numbers(sampler, 4) == [1, 3, 2, 0]


def test_a_difficulty_that_is_missing_is_named() -> None:
    message = (
        r"sampler easy_to_hard: 2 of 3 tasks have no number in the column difficulty \(first: task t:1\); name another "
        "column, or give them one by the operator `difficulty`"
    )
    with pytest.raises(TasksetError, match=message):
        sampler_of(taskset_of(3, difficulty=[1, None, "hard"]), "easy_to_hard")


# -- skipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shuffled", "sequential"])
def test_uniform_groups_are_skipped_for_some_epochs(name: str) -> None:
    sampler = sampler_of(taskset_of(4), {"name": name, "skip_uniform": 2})
    numbers(sampler, 4)
    see(sampler, [0.0, 1.0, 0.5, 0.1])
    assert [sorted(numbers(sampler, 2)) for _ in range(2)] == [[2, 3]] * 2
    assert (sampler.epoch, sampler.metrics()["tasks/skipped"]) == (2, 0.5)
    assert sorted(numbers(sampler, 4)) == [0, 1, 2, 3]
    assert sampler.metrics() == {"tasks/epoch": 3, "tasks/skipped": 0.0}


def test_where_all_are_skipped_epochs_pass() -> None:
    sampler = sampler_of(taskset_of(3), {"name": "sequential", "skip_uniform": 1000})
    numbers(sampler, 3)
    see(sampler, [0.0, 1.0, 0.0])
    assert numbers(sampler, 3) == [0, 1, 2]
    assert sampler.epoch == 1001


def test_drawing_orders_skip_for_as_many_draws_as_there_are_tasks() -> None:
    sampler = sampler_of(taskset_of(4), {"name": "prioritised", "skip_uniform": 1, **KNOWN}, batch=1)
    numbers(sampler, 1)
    see(sampler, [0.0, 0.0, 0.0, 0.9])
    assert numbers(sampler, 7) == [3] * 7
    assert set(numbers(sampler, 40)) > {0, 1, 2}
    see(sampler, [0.0] * 4)
    assert len(set(numbers(sampler, 20))) > 1  # all are left out: those come that were left out longest


def test_a_single_completion_is_no_uniform_group() -> None:
    sampler = sampler_of(taskset_of(2), {"name": "sequential", "skip_uniform": 5})
    numbers(sampler, 2)
    sampler.observe("t:0", [1.0])
    assert numbers(sampler, 2) == [0, 1]


# -- users' samplers ------------------------------------------------------------------------------------------------


@pytest.fixture
def middling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", {})

    @rollmill.sampler
    def middling(view: TaskView, *, power: float = 1.0) -> NDArray[np.float64]:
        """Tasks with a rate in the middle."""
        return (view.rates * (1 - view.rates)) ** power


def test_the_decorator_has_its_former_name_too() -> None:
    assert rollmill.order is rollmill.sampler


def test_a_users_sampler_weighs_tasks(middling: None) -> None:
    sampler = sampler_of(taskset_of(3), {"name": "middling", "power": 2.0, **KNOWN})
    see(sampler, [0.5, 0.9, 1.0])
    drawn = Counter(numbers(sampler, 5000))
    assert drawn[2] == 0
    assert chi_square([drawn[0], drawn[1]], [0.25**2, 0.09**2]) < 10.8


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"taskset.sampler `broken`: expected 3 weights .* found an array of shape \[1\] from 1 to 1"),
        ([1, 2, -1], r"shape \[3\] from -1 to 2"),
        ([0, 0, 0], "not all 0"),
        (None, "broken` raised TypeError: .*test_difficulty_samplers.py:[0-9]+; correct it"),
    ],
)
def test_a_users_sampler_has_to_give_weights(result: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", {})

    @rollmill.sampler
    def broken(view: TaskView) -> Any:
        return [1.0] / view.step if result is None else result

    with pytest.raises(TasksetError, match=message):
        sampler_of(taskset_of(3), "broken").next(0)


# -- states --------------------------------------------------------------------------------------------------------

SECTIONS: list[dict[str, Any]] = [
    {"name": "shuffled", "skip_uniform": 2},
    {"name": "sequential", "skip_uniform": 1},
    {"name": "easy_to_hard"},
    {"name": "easy_to_hard", "by": "success", "skip_uniform": 1},
    {"name": "curriculum", "warmup": 3},
    {"name": "curriculum", "warmup": 2, "by": "difficulty", "skip_uniform": 1},
    {"name": "prioritised"},
    {"name": "prioritised", "skip_uniform": 3, "discount": 1.0},
    {"name": "posterior", "target": 0.3, "skip_uniform": 1},
]


def play(sampler: Sampler, random_: random.Random, step: int, count: int) -> list[str]:
    """A life of draws and observations, the latter up to some tasks late."""
    life, waiting = [], []
    for number in range(count):
        task = sampler.next(step + number // 4)
        life.append(f"{task.id} {sampler.epoch}")
        waiting.append(task.id)
        while waiting and random_.random() < 0.4:
            sampler.observe(waiting.pop(0), [float(random_.random() < 0.6) for _ in range(2)])
    return [*life, json.dumps(sampler.metrics())]


@settings(max_examples=60)
@given(st.sampled_from(SECTIONS), st.integers(1, 9), st.integers(-5, 99), st.integers(1, 7), st.integers(0, 40))
def test_a_state_goes_on_exactly(section: dict[str, Any], size: int, seed: int, batch: int, done: int) -> None:
    taskset = taskset_of(size, difficulty=[number % 3 for number in range(size)])
    sampler = sampler_of(taskset, section, seed, batch)
    play(sampler, random.Random(seed), 0, done)
    state = sampler.state_dict()
    stored = json.dumps(state)
    expected = play(sampler, random.Random(done), done // 4, 30)
    assert json.dumps(state) == stored, "a state is a snapshot"
    resumed = sampler_of(taskset, section, seed, batch)
    resumed.load_state_dict(json.loads(stored))
    assert resumed.state_dict() == state
    assert play(resumed, random.Random(done), done // 4, 30) == expected
    assert resumed.state_dict() == sampler.state_dict()


@given(st.sampled_from(SECTIONS), st.integers(1, 9), st.integers(0, 9))
def test_there_is_always_a_task(section: dict[str, Any], size: int, seed: int) -> None:
    """Even where every group is uniform."""
    taskset = taskset_of(size, difficulty=[0] * size)
    sampler = sampler_of(taskset, section, seed, batch=3)
    seen = set()
    for number in range(60):
        task = sampler.next(number // 3)
        seen.add(task.id)
        sampler.observe(task.id, [1.0, 1.0])
    assert len(seen) == size or section["name"] in ("prioritised", "posterior")


@pytest.mark.parametrize(
    ("section", "taskset", "message"),
    [
        (
            {"name": "prioritised", "floor": 0.2},
            taskset_of(3),
            "sampler was {name: prioritised.*floor: 0.1.*is {name: p",
        ),
        ({"name": "shuffled"}, taskset_of(3), "sampler was {name: prioritised.*}, is shuffled"),
        ({"name": "prioritised", "floor": 0.1}, taskset_of(4), "size was 3, is 4"),
    ],
)
def test_a_state_of_something_else_is_refused(section: Any, taskset: Taskset, message: str) -> None:
    state = sampler_of(taskset_of(3), {"name": "prioritised", "floor": 0.1}).state_dict()
    with pytest.raises(TasksetError, match=message):
        sampler_of(taskset, section).load_state_dict(state)


def test_other_difficulties_are_refused() -> None:
    state = sampler_of(taskset_of(3, difficulty=[1, 2, 3]), "easy_to_hard").state_dict()
    with pytest.raises(TasksetError, match=r"taskset t changed since the checkpoint \(column difficulty was"):
        sampler_of(taskset_of(3, difficulty=[1, 2, 4]), "easy_to_hard").load_state_dict(state)


def test_where_nothing_is_observed_orders_by_success_shuffle() -> None:
    config = TasksetConfig.model_validate({"path": "x", "sampler": {"name": "posterior"}})
    sampler = build_sampler(taskset_of(6), config.sampler, 0, batch=4, observed=False)
    assert sorted(numbers(sampler, 6)) == list(range(6))
    config = TasksetConfig.model_validate({"path": "x", "sampler": {"name": "sequential", "skip_uniform": 3}})
    assert numbers(build_sampler(taskset_of(3), config.sampler, 0, batch=4, observed=False), 4) == [0, 1, 2, 0]
