"""Recipes: what each algorithm's options turn into."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from rollmill.algorithms import RewardInputs, TermInputs, build_recipe
from rollmill.config.algorithm import AlgorithmConfig
from rollmill.core import Source


def _recipe(**options: object) -> object:
    return build_recipe(TypeAdapter(AlgorithmConfig).validate_python(options), max_new_tokens=10)


def _inputs(n: int) -> TermInputs:
    zeros = torch.zeros(n)
    return TermInputs(zeros - 1, zeros - 1, zeros - 1, zeros + 2, zeros + 0.5, zeros - 1, zeros.long())


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce", "rloo"])
def test_policy_gradient_terms(name: str) -> None:
    recipe = _recipe(name=name)
    assert recipe.name == name
    assert [t.name for t in recipe.terms] == ["policy"]
    assert not recipe.uses_reference
    assert not recipe.uses_entropy
    assert recipe.terms[0].source is Source.USUAL
    full = _recipe(name=name, kl=0.2, entropy=0.01, importance_cap=3)
    assert {t.name: t.weight for t in full.terms} == {"policy": 1, "kl": 0.2, "entropy": -0.01}
    assert full.uses_reference
    assert full.uses_entropy
    assert full.importance_cap == 3
    assert [t.fn(_inputs(2)).tolist() for t in full.terms] == [[-2, -2], [0, 0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", [1 / 4, 1 / 12]), ("dr_grpo", [1 / 20] * 2), ("dapo", [1 / 8] * 2), ("rloo", [1 / 8] * 2)],
)
def test_default_aggregations(name: str, expected: list[float]) -> None:
    weights = _recipe(name=name).terms[0].aggregate(torch.tensor([2, 6]))
    assert weights.tolist() == pytest.approx(expected)


def test_mix_is_convex_over_the_whole_grpo_loss() -> None:
    terms = {t.name: t for t in _recipe(name="mix", mu=0.1, kl=0.5).terms}
    assert {n: t.weight for n, t in terms.items()} == pytest.approx({"policy": 0.9, "kl": 0.45, "sft": 0.1})
    assert terms["sft"].source is Source.EXPERT
    assert terms["policy"].source is Source.USUAL


def test_sft_needs_no_rewards() -> None:
    recipe = _recipe(name="sft", aggregation="sequence-mean")
    assert recipe.advantage is None
    assert recipe.terms[0].fn(_inputs(1)).tolist() == [1]
    assert recipe.terms[0].aggregate(torch.tensor([2, 5])).tolist() == pytest.approx([1 / 4, 1 / 10])


def test_dapo_penalises_length_before_comparing() -> None:
    inputs = RewardInputs(
        torch.tensor([1.0, 1.0, 0.0, 0.0]).double(), torch.tensor([0, 0, 1, 1]), torch.tensor([8, 10, 3, 2])
    )
    plain = _recipe(name="dapo").advantage(inputs)
    assert plain.values.tolist() == [0, 0, 0, 0]
    assert not plain.counted.any()
    shaped = _recipe(name="dapo", overlong_buffer=4).advantage(inputs)  # penalties -.5, -1, 0, 0
    assert shaped.counted.tolist() == [True, True, False, False]
    assert shaped.values[0] == -shaped.values[1] > 0
    assert _recipe(name="dapo", drop_uniform_groups=False).advantage(inputs).counted.all()


def test_unjudged_experiences_are_not_counted() -> None:
    inputs = RewardInputs(
        torch.tensor([1.0, float("nan"), 0.0]).double(), torch.zeros(3).long(), torch.tensor([8, 10, 3])
    )
    for name in ("grpo", "dr_grpo", "dapo", "reinforce", "rloo", "mix"):
        assert _recipe(name=name).advantage(inputs).counted.tolist() == [True, False, True]
