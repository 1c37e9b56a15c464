"""The recipe of a stage with domains, from those of its domains."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from rollmill.algorithms.policy_recipes import build_recipe, combine_recipes
from rollmill.algorithms.recipe import Recipe
from rollmill.config.algorithms import AlgorithmConfig


def recipe(name: str = "grpo", **options: Any) -> Recipe:
    config = TypeAdapter(AlgorithmConfig).validate_python({"name": name, **options})
    return build_recipe(config, max_new_tokens=10)


def weight(recipe: Recipe, name: str, step: int = 0) -> float:
    """Weight of a term before the coefficient that adapts."""
    [term] = [each for each in recipe.terms if each.name == name]
    return float(term.weight(step) if callable(term.weight) else term.weight)


def test_each_domain_keeps_its_own_kl_coefficient() -> None:
    combined = combine_recipes(recipe(kl=0.3), {"a": recipe(kl=0.1), "b": recipe("opo", kl=0.7), "c": recipe()})
    assert {name: each.name for name, each in combined.domains.items()} == {"a": "grpo", "b": "opo", "c": "grpo"}
    for name, expected in (("a", 0.1), ("b", 0.7)):
        assert weight(combined.domains[name], "kl") == pytest.approx(expected)
        assert weight(combined.domains[name], "policy") == 1
        assert [each.is_kl for each in combined.domains[name].terms] == [False, False]
    assert weight(combined, "kl") == 1
    assert [each.name for each in combined.domains["c"].terms] == ["policy"]


def test_a_coefficient_that_adapts_is_shared() -> None:
    options = {"coefficient": 0.3, "target": 0.01}
    combined = combine_recipes(recipe(kl=options), {"a": recipe(kl=options)})
    [term] = [each for each in combined.domains["a"].terms if each.name == "kl"]
    assert term.is_kl
    assert term.weight == 1


def test_a_share_that_follows_a_schedule_is_scaled() -> None:
    alone = recipe("chord", kl=0.2)
    combined = combine_recipes(recipe(), {"a": alone})
    for step in (0, 3, 1000):
        assert weight(combined.domains["a"], "kl", step) == pytest.approx(0.2 * weight(alone, "kl", step))
        assert weight(combined.domains["a"], "policy", step) == weight(alone, "policy", step)


def test_experiences_of_no_domain_have_the_stages_recipe() -> None:
    stage, domain = recipe(kl=0.3), recipe("opo")
    assert stage.of_domain("a") is stage
    combined = combine_recipes(stage, {"a": domain})
    assert combined.of_domain("") is combined
    assert combined.of_domain("a") == domain
    assert combined.terms == stage.terms


def test_a_stage_uses_what_one_of_its_domains_uses() -> None:
    plain = recipe()
    for needs, name, options in (
        ("uses_reference", "grpo", {"kl": 0.1}),
        ("uses_reference", "grpo", {"kl": {"coefficient": 0.1, "where": "reward"}}),
        ("uses_entropy", "grpo", {"entropy": 0.01}),
        ("uses_probabilities", "grpo", {"advantage": {"name": "optimal_token_baseline"}}),
    ):
        other = recipe(name, **options)
        assert not getattr(combine_recipes(plain, {"a": plain, "b": plain}), needs)
        assert getattr(combine_recipes(plain, {"a": plain, "b": other}), needs), needs
        assert getattr(combine_recipes(plain, {"a": other, "b": plain}), needs), needs
        assert getattr(combine_recipes(other, {"a": plain}), needs), needs


def test_rollouts_of_a_policy_have_an_advantage() -> None:
    for name in ("grpo", "ppo", "opo"):
        assert recipe(name).compares_rewards
    assert recipe("grpo", advantage={"name": "optimal_token_baseline"}).compares_rewards
    assert not recipe("sft").compares_rewards
