"""Domains in the trainer: each has its own advantages and terms, and weighs as much as its share of the groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.algorithm_batches import options_of
from torch import Tensor

from rollmill.algorithms import Recipe, build_recipe
from rollmill.algorithms.policy_recipes import combine_recipes
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.loss import PrecomputedScores, StepLoss, compute_advantages
from rollmill.trainer.update import split_mini_batches
from rollmill.types import Experience, ExperienceSource

CPU = torch.device("cpu")


def recipe_of(name: str, **keys: Any) -> Recipe:
    return build_recipe(options_of(name, **keys), max_new_tokens=10)


def made(domain: str, group: int, index: int, length: int, reward: float) -> Experience:
    at = np.arange(2 + length)
    mask = at >= 2
    return Experience(
        f"{domain}{group}/{index}",
        f"{domain}/task-{group}",
        f"{domain}-{group}",
        token_ids=(at + 3).astype(np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -at / 8, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
    )


def gradients(recipe: Recipe, batch: list[Experience], micro_batch_tokens: int = 1) -> dict[str, Tensor]:
    """Gradient of the loss by the log-prob of every token, by experience; the reference is half as likely."""
    table = build_token_table(batch, CPU)
    scores = PrecomputedScores(reference=table.rollout_logprob - 0.5) if recipe.uses_reference else PrecomputedScores()
    advantages = compute_advantages(batch, table, recipe, scores, kl_coefficient=recipe.kl.coefficient)
    loss = StepLoss(recipe, table, advantages, scores, list(range(len(batch))), kl_coefficient=recipe.kl.coefficient)
    found = torch.zeros(len(table.target))
    for micro in build_micro_batches(batch, table, range(len(batch)), micro_batch_tokens, CPU):
        for source, domain in loss.kinds:
            logprob = table.rollout_logprob[micro.tokens].clone().requires_grad_()
            inputs, tokens = loss.inputs(micro, logprob, -logprob, source, None, domain)
            for weight, value in loss.terms(inputs, tokens, source, domain).values():
                found[micro.tokens] += weight * torch.autograd.grad(value, logprob, retain_graph=True)[0]
    return {
        each.id: found[start:end] for each, start, end in zip(batch, table.offsets, table.offsets[1:], strict=False)
    }


MATH = [made("math", 0, 0, 3, 1.0), made("math", 0, 1, 5, 0.0), made("math", 1, 0, 4, 0.0), made("math", 1, 1, 2, 1.0)]
CODE = [made("code", 0, 0, 40, 1.0), made("code", 0, 1, 10, 0.3), made("code", 0, 2, 7, 0.0)]


@pytest.mark.parametrize(
    ("math", "code"),
    [
        ({"name": "grpo"}, {"name": "grpo"}),
        ({"name": "grpo", "aggregation": "token-mean"}, {"name": "dr_grpo"}),
        ({"name": "rloo"}, {"name": "dapo"}),
        ({"name": "lite_ppo"}, {"name": "grpo", "kl": 0.1}),
        ({"name": "grpo", "kl": 0.2, "entropy": 0.01}, {"name": "opo", "kl": 0.05}),
    ],
)
def test_the_loss_is_the_mean_of_the_domains_own_losses_by_their_groups(
    math: dict[str, Any], code: dict[str, Any]
) -> None:
    """Each domain has the gradient that it has alone, times its share of the groups: 2 and 1 of 3."""
    recipes = {name: recipe_of(**keys) for name, keys in (("math", math), ("code", code))}
    together = gradients(combine_recipes(recipes["math"], recipes), [MATH[0], *CODE, *MATH[1:]])
    alone = {
        id: values * share
        for name, batch, share in (("math", MATH, 2 / 3), ("code", CODE, 1 / 3))
        for id, values in gradients(recipes[name], batch).items()
    }
    in_one_micro_batch = gradients(combine_recipes(recipes["math"], recipes), [MATH[0], *CODE, *MATH[1:]], 1000)
    assert together.keys() == alone.keys() == in_one_micro_batch.keys()
    for id, values in together.items():
        torch.testing.assert_close(values, alone[id])
        torch.testing.assert_close(in_one_micro_batch[id], values)


def test_demonstrations_and_rollouts_are_shared_among_domains_each_on_their_own() -> None:
    """Three demonstrations of code leave the rollouts' shares as they are, and all of theirs to code."""
    recipe = recipe_of("mix")
    combined = combine_recipes(recipe, {"math": recipe, "code": recipe})
    experts = [replace(made("code", 9 + i, 0, 4, 1.0), source=ExperienceSource.EXPERT) for i in range(3)]
    without, found = gradients(combined, MATH + CODE), gradients(combined, MATH + CODE + experts)
    for id, values in without.items():
        torch.testing.assert_close(found[id], values)
    alone = gradients(recipe, experts)
    for each in experts:
        torch.testing.assert_close(found[each.id], alone[each.id])
        assert found[each.id].abs().sum() > 0


def test_a_group_from_which_nothing_is_learned_takes_no_share() -> None:
    """An experience that is not counted, here one without an own token, is no group of its domain."""
    recipe = recipe_of("dr_grpo")
    combined = combine_recipes(recipe, {"math": recipe, "code": recipe})
    empty = [made("code", 7, index, 0, 0.0) for index in range(2)]
    without, found = gradients(combined, MATH + CODE), gradients(combined, MATH + CODE + empty)
    for id, values in without.items():
        torch.testing.assert_close(found[id], values)


@given(
    longer=st.integers(1, 30),
    copies=st.integers(1, 4),
    aggregation=st.sampled_from(["token-mean", "sequence-mean"]),
)
def test_weights_of_domains_do_not_depend_on_lengths_and_group_sizes(
    longer: int, copies: int, aggregation: str
) -> None:
    """The absolute advantage-weighted mass of a domain is its share of the groups, whatever its completions are."""
    recipe = recipe_of("dr_grpo", aggregation=aggregation)
    code = [made("code", 0, index, longer, float(index % 2)) for index in range(2 * copies)]
    math = [made("math", 0, index, 3, float(index % 2)) for index in range(2)]
    found = gradients(combine_recipes(recipe, {"math": recipe, "code": recipe}), [*code, *math])
    mass = {
        name: sum(float(found[each.id].abs().sum()) for each in batch)
        for name, batch in (("code", code), ("math", math))
    }
    assert mass["code"] == pytest.approx(0.25, rel=1e-5)  # half of the groups, |advantage| = .5
    assert mass["math"] == pytest.approx(0.25, rel=1e-5)


def test_experiences_of_no_domain_have_the_stages_recipe() -> None:
    recipes = {"math": recipe_of("dr_grpo")}
    stray = replace(CODE[0], id="stray", task_id="imported:3", group="stray")
    batch = [*MATH, stray, replace(stray, id="other", reward=0.0)]
    table = build_token_table(batch, CPU)
    found = compute_advantages(batch, table, combine_recipes(recipe_of("grpo"), recipes))
    assert found.domains == ["math"] * 4 + ["", ""]
    assert batch[-2].advantage is not None
    assert batch[-2].advantage.max() == pytest.approx(1 / np.sqrt(2), rel=1e-3)  # grpo divides by the deviation


def test_every_part_of_a_batch_has_its_share_of_each_domain() -> None:
    batch = [made("math", group, index, 2, 0.0) for group in range(4) for index in range(2)]
    batch += [made("code", group, index, 2, 0.0) for group in range(2) for index in range(2)]
    domains = [each.task_id.partition("/")[0] for each in batch]
    parts = split_mini_batches(batch, 2, None, domains)
    assert [[domains[i] for i in part] for part in parts] == [["math"] * 4 + ["code"] * 2] * 2
