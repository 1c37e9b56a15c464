"""Which algorithms estimate the policy gradient without bias: enumeration over completions of different lengths."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gradient import EXACT, PAIRS, Tree, compared, enumerable
from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import known_algorithms

SMALL = Tree(letters=1, longest=3, seed=4)
WIDE = Tree(letters=2, longest=2, seed=5)


def measured(tree: Tree, group_size: int, *, best_of: int = 1, **keys: Any) -> tuple[float, float]:
    options = known_algorithms()[keys["name"]].model_validate(keys)
    recipe = build_recipe(options, max_new_tokens=tree.longest)
    return compared(tree.expected_update(recipe, group_size), tree.policy_gradient(best_of))


@pytest.mark.parametrize(
    ("tree", "group_size", "bound"),
    [(SMALL, 2, 1e-12), (WIDE, 2, 1e-12), (SMALL, 3, 1e-7), (SMALL, 4, 1e-7)],
    ids=["1-3 tokens, pairs", "1-2 tokens, pairs", "groups of three", "groups of four"],
)
def test_the_expected_update_of_rloo_is_the_policy_gradient(tree: Tree, group_size: int, bound: float) -> None:
    """Advantages and weights are kept in float32, which thirds do not fit: hence the two bounds."""
    recipe = build_recipe(known_algorithms()["rloo"].model_validate({"name": "rloo"}), max_new_tokens=tree.longest)
    update, gradient = tree.expected_update(recipe, group_size), tree.policy_gradient()
    assert gradient.abs().max() > 0.01
    assert (update - gradient).abs().max() < bound


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_a_mean_over_tokens_is_biased(aggregation: str) -> None:
    """Negative control: with RLOO's former aggregation the test above would fail."""
    cosine, length = measured(SMALL, 2, name="rloo", aggregation=aggregation)
    assert cosine < 0.985
    assert length < 0.9


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"name": "remax"}, 1.0),
        ({"name": "dr_grpo"}, 0.5 / 3),  # 1 - 1/G, over the longest completion
        ({"name": "dr_grpo", "advantage": "rloo", "aggregation": "sequence-sum-mean"}, 1.0),
        ({"name": "topr"}, 0.5),
        ({"name": "kimi"}, 2 * 0.1 * 0.5),
        ({"name": "sppo", "loss": {"beta": 0.5}}, 2 / 0.5 * 0.5),
    ],
    ids=lambda each: str(each),
)
def test_others_have_its_direction(keys: dict[str, Any], factor: float) -> None:
    assert measured(SMALL, 2, **keys) == (pytest.approx(1.0, abs=1e-6), pytest.approx(factor, rel=1e-6))


@pytest.mark.parametrize(("k", "group_size"), [(2, 2), (2, 3), (3, 4)])
def test_pass_at_k_without_deviation_is_the_gradient_of_pass_at_k(k: int, group_size: int) -> None:
    keys = PAIRS | {"name": "pass_at_k", "advantage": {**PAIRS["advantage"], "k": k}}
    assert measured(SMALL, group_size, best_of=k, **keys) == (
        pytest.approx(1.0, abs=1e-6),
        pytest.approx(1 / k, rel=1e-6),
    )


def test_the_benchmark_has_every_algorithm_that_learns_from_rewards_alone() -> None:
    assert set(EXACT) <= set(enumerable())
    assert {"grpo", "raft", "otb", "clip_v", "m2po", "rloo, token-mean"} <= set(enumerable())
    assert not {"ppo", "mix", "sft", "distill"} & set(enumerable())
