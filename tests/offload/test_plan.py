"""Plans: what leaves, what stays, and what the error says where nothing helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.offload import PHASES, Phase
from rollmill.errors import ConfigError
from rollmill.offload import ComponentSpec, OffloadPlan, plan_offload

NAMES = ("policy", "optimizer", "reference", "critic", "cache")


def part(name: str, size: int, *needed: Phase, choice: str = "auto", eager: bool = False) -> ComponentSpec:
    return ComponentSpec(name, size, frozenset(needed), choice, "disk", eager)  # type: ignore[arg-type]


@st.composite
def parts(draw: st.DrawFn) -> list[ComponentSpec]:
    return [
        part(
            name,
            draw(st.integers(0, 50)),
            *draw(st.sets(st.sampled_from(PHASES))),
            choice=draw(st.sampled_from(("auto", "device", "memory", "disk"))),
            eager=name == "cache",
        )
        for name in NAMES
    ]


def planned(some: list[ComponentSpec], budget: float) -> OffloadPlan | None:
    try:
        return plan_offload(some, PHASES, budget)
    except ConfigError:
        return None


@given(parts(), st.integers(1, 200))
def test_no_phase_is_above_the_budget_and_each_has_what_it_needs(some: list[ComponentSpec], budget: int) -> None:
    plan = planned(some, budget)
    if plan is None:
        most = max(sum(p.size for p in some if phase in p.needed or p.choice == "device") for phase in PHASES)
        assert most > budget
        return
    for phase in PHASES:
        places = plan.places[phase]
        here = [each for each in some if places[each.name] == "device"]
        assert plan.sizes[phase] == sum(each.size for each in here) <= budget
        assert all(places[each.name] == "device" for each in some if phase in each.needed or each.choice == "device")
        left = [each for each in some if each not in here]
        assert all(places[each.name] == "disk" for each in left), "memory is the device here"
        by_budget = [each for each in left if each.choice == "auto" and not each.eager]
        idle = [each for each in here if each.choice == "auto" and phase not in each.needed]
        assert all(gone.size >= kept.size for gone in by_budget for kept in idle), "the largest leaves first"


def test_nothing_leaves_where_there_is_room_and_the_cache_leaves_with_the_first() -> None:
    some = [part("policy", 10, *PHASES), part("optimizer", 20, "train"), part("cache", 0, "rollout", eager=True)]
    plan = plan_offload(some, PHASES, 30)
    assert {place for places in plan.places.values() for place in places.values()} == {"device"}
    assert "everything stays where it is" in plan.describe()
    plan = plan_offload([*some, part("reference", 5, "inference")], PHASES, 30)
    assert plan.places["train"] == {"policy": "device", "optimizer": "device", "reference": "disk", "cache": "disk"}
    assert plan.places["rollout"]["optimizer"] == "disk"
    assert plan.places["rollout"]["reference"] == "device"
    assert "optimizer on disk in rollout and inference" in plan.describe()


def test_the_error_names_phase_components_and_sizes() -> None:
    some = [part("policy", 2_000_000_000, *PHASES), part("critic_optimizer", 4_000_000_000, "train")]
    with pytest.raises(ConfigError) as caught:
        plan_offload(some, PHASES, 5e9, where="stage rl: ")
    assert str(caught.value) == (
        "stage rl: offload.budget_gb: the budget is 5 GB, and the phase `train` needs 6 GB on the device (policy 2, "
        "critic optimizer 4); raise budget_gb, or make the models smaller"
    )
