"""Sampler of domains: shares by weight, size, need and schedule; pauses; resume."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.domains import DomainConfig, MixingConfig
from rollmill.data.samplers.builtin.epochs import ShuffledSampler
from rollmill.data.samplers.domains import DomainSampler
from rollmill.data.samplers.factory import build_sampler
from rollmill.data.taskset import MixtureComponent, Taskset
from rollmill.errors import TasksetError
from rollmill.types import Task


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sampler_of(weights: dict[str, Any], sizes: dict[str, int] | None = None, **mixing: Any) -> DomainSampler:
    sizes = sizes or dict.fromkeys(weights, 10)
    tasks = [Task(f"{name}/{n}", "?", taskset=name) for name in weights for n in range(sizes[name])]
    mixed = tuple(MixtureComponent(name, 1.0, ShuffledSampler()) for name in weights)
    domains = {name: DomainConfig(taskset={"path": "x.jsonl"}, weight=weight) for name, weight in weights.items()}
    taskset = Taskset("all", tasks, [], mixed=mixed)
    sampler = build_sampler(taskset, ShuffledSampler(), 3, batch=8, domains=domains, mixing=MixingConfig(**mixing))
    assert isinstance(sampler, DomainSampler)
    sampler._clock = Clock()
    return sampler


def drawn(sampler: DomainSampler, count: int, step: int = 0) -> Counter[str]:
    return Counter(sampler.next(step).taskset for _ in range(count))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(1, 60))
def test_every_domain_has_its_share_of_any_number_of_draws(weights: list[float], count: int) -> None:
    named = {f"d{n}": weight for n, weight in enumerate(weights)}
    found = drawn(sampler_of(named), count)
    for name, weight in named.items():
        assert abs(found[name] - count * weight / sum(weights)) < len(weights)


def test_shares_by_size() -> None:
    assert drawn(sampler_of({"a": 1, "b": 1}, {"a": 30, "b": 10}, by="size"), 40) == {"a": 30, "b": 10}


def test_shares_by_schedule() -> None:
    sampler = sampler_of({"a": [(0, 1), (10, 0)], "b": 1})
    assert sampler.shares(0) == {"a": 0.5, "b": 0.5}
    assert sampler.shares(5) == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert sampler.shares(10) == sampler.shares(99) == {"b": 1.0}


def test_shares_by_need_are_bounded() -> None:
    sampler = sampler_of({"a": 1, "b": 1}, by="need", memory=2, least=0.5, most=3)
    assert sampler.shares(0) == {"a": 0.5, "b": 0.5}
    for _ in range(50):
        sampler.observe_rewards("a/1", [1.0, 1.0])  # all equal: it teaches nothing
        sampler.observe_rewards("b/1", [1.0, 0.0])
    assert sampler.metrics()["tasks/a/need"] == pytest.approx(0, abs=1e-9)
    assert sampler.shares(0) == pytest.approx({"a": 0.5 / 2.5, "b": 2 / 2.5})  # b: 1 / .5 of the mean need


def test_a_paused_domain_is_left_out_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of({"a": 1, "b": 1}, pause_s=10)
    clock: Any = sampler._clock
    with caplog.at_level(logging.WARNING):
        assert sampler.pause("a", "its judge is away")
        assert sampler.pause("a", "another of its groups")  # belongs to the same pause
    assert "domain a is paused for 10 s (pause 1 of 8 in a row): its judge is away; b go on" in caplog.text
    assert len(caplog.records) == 1
    assert drawn(sampler, 5) == {"b": 5}
    assert sampler.metrics()["tasks/a/paused"] == 1
    clock.now = 10.0
    assert drawn(sampler, 10)["a"] > 0
    assert sampler.pause("a", "again")
    clock.now = 29.0
    assert sampler.is_paused("a")  # twice as long
    clock.now = 30.0
    sampler.observe_rewards("a/1", [1.0])  # it works again, so that the next pause is the first one
    assert sampler.pause("a", "later")
    clock.now = 40.0
    assert not sampler.is_paused("a")


def test_the_last_domain_is_not_paused_and_none_for_ever() -> None:
    sampler = sampler_of({"a": 1, "b": 1}, pause_s=1, pauses=2)
    clock: Any = sampler._clock
    assert sampler.pause("a", "lost")
    assert not sampler.pause("b", "lost")
    clock.now = 5.0
    assert sampler.pause("a", "lost")
    clock.now = 50.0
    assert not sampler.pause("a", "lost")


def test_a_resumed_sampler_goes_on_as_the_first_one() -> None:
    first, second = sampler_of({"a": 3, "b": 1}, by="need"), sampler_of({"a": 3, "b": 1}, by="need")
    drawn(first, 7)
    first.observe_rewards("a/1", [0.0, 0.0])
    second.load_state_dict(first.state_dict())
    assert [first.next().id for _ in range(20)] == [second.next().id for _ in range(20)]
    with pytest.raises(TasksetError, match="changed since the checkpoint"):
        sampler_of({"a": 2, "b": 1}, by="need").load_state_dict(first.state_dict())
