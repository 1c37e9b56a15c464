"""The loss of one optimizer step, by hand: who counts, under which denominator, with which weight."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import distance, gradient, options_of, padded_logprobs, trainer_of, watch_gradients
from torch import Tensor

from rollmill.algorithms import build_recipe
from rollmill.algorithms.recipe import MaskInputs, Recipe
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.loss import PrecomputedScores, StepLoss, compute_advantages
from rollmill.types import Experience, ExperienceSource

CPU = torch.device("cpu")
LENGTHS = (3, 1, 4, 2)  #: action tokens of the experiences below
REWARDS = (1.0, 0.0, 1.0, 0.0)


def recipe_of(name: str, **keys: Any) -> Recipe:
    return build_recipe(options_of(name, **keys), max_new_tokens=10)


def made(
    id: str, group: str, length: int, reward: float | None, source: ExperienceSource = ExperienceSource.ROLLOUT
) -> Experience:
    """A prompt of two tokens and `length` of the policy; token t has the log-prob -t/8 and the version t."""
    at = np.arange(2 + length)
    mask = at >= 2
    return Experience(
        id,
        f"task-{id}",
        group,
        token_ids=(at + 3).astype(np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -at / 8, 0).astype(np.float32),
        versions=np.where(mask, at, -1).astype(np.int32),
        reward=reward,
        source=source,
        temperature=0.5,
    )


def batch_of(lengths: tuple[int, ...] = LENGTHS, rewards: tuple[float | None, ...] = REWARDS) -> list[Experience]:
    """Groups of two."""
    numbered = enumerate(zip(lengths, rewards, strict=True))
    return [made(f"e{n}", f"g{n // 2}", length, reward) for n, (length, reward) in numbered]


def advantages(batch: list[Experience]) -> list[list[float]]:
    return [each.advantage[each.action_mask].tolist() for each in batch]


def losses(
    recipe: Recipe, batch: list[Experience], part: list[int], scores: PrecomputedScores | None = None, **objective: Any
) -> dict[str, Tensor]:
    """Every term's share of each token of the part, [tokens], where the policy is the one that rolled out."""
    table = build_token_table(batch, CPU)
    scores = scores or PrecomputedScores()
    judgement = compute_advantages(batch, table, recipe, scores)
    whole = StepLoss(recipe, table, judgement, scores, part, **objective)
    found: dict[str, Tensor] = {}
    for micro in build_micro_batches(batch, table, part, 1, CPU):
        for source in ExperienceSource:
            logprob = table.rollout_logprob[micro.tokens].clone().requires_grad_()
            inputs, tokens = whole.inputs(micro, logprob, torch.ones(len(logprob)), source)
            for name, (weight, value) in whole.terms(inputs, tokens, source).items():
                kept = found.setdefault(name, torch.zeros(len(table.target)))
                kept[micro.tokens] += weight * torch.autograd.grad(value, logprob, retain_graph=True)[0]
    return found


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token-mean", lambda n, part: 1 / sum(LENGTHS[i] for i in part)),
        ("sequence-mean", lambda n, part: 1 / (LENGTHS[n] * len(part))),
        ("sequence-sum-mean", lambda n, part: 1 / len(part)),
        ("constant", lambda n, part: 1 / (10 * len(part))),
    ],
)
@pytest.mark.parametrize("part", [[0, 1], [2, 3], [0, 1, 2, 3]])
def test_denominators_are_those_of_the_part_that_is_learned_from(
    aggregation: str, weight: Any, part: list[int]
) -> None:
    """The gradient by a token's log-prob is -A times the token's weight: of its part's tokens and experiences alone."""
    batch = batch_of()
    found = losses(recipe_of("dr_grpo", aggregation=aggregation), batch, part)["policy"]
    expected = []
    for n, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        expected += [-(reward - 0.5) * weight(n, part) if n in part else 0.0] * length
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum-mean"])
def test_every_update_of_a_batch_has_the_denominator_of_its_own_groups(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    """With two groups and two updates each update learns from one group, as if there were no other."""
    model, batch = toy("qwen3"), make_batch(groups=2)
    options = options_of("dr_grpo", aggregation=aggregation)
    expected = []
    for name in ("g0", "g1"):
        group = [each for each in batch if each.group == name]
        rewards = [each.reward for each in group]
        own = padded_logprobs(model, group)
        tokens = sum(each.action_tokens for each in group)
        weights = {
            "token-mean": [1 / tokens] * len(group),
            "sequence-mean": [1 / (len(group) * each.action_tokens) for each in group],
            "sequence-sum-mean": [1 / len(group)] * len(group),
        }[aggregation]
        terms = []
        for each, logprob, weight in zip(group, own, weights, strict=True):
            ratio = torch.exp(logprob - torch.from_numpy(each.logprobs[each.action_mask]))
            a = each.reward - np.mean(rewards)
            terms.append(-weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum())
        expected.append(gradient(sum(terms), model))
    seen = watch_gradients(monkeypatch)
    trainer_of(model, options, updates_per_batch=2, lr=1e-12).step(batch, 0)
    got = seen["policy"]
    order = (0, 1) if distance(got[0], expected[0]) < distance(got[0], expected[1]) else (1, 0)
    assert max(distance(one, expected[n]) for one, n in zip(got, order, strict=True)) < 1e-5


def test_advantages_of_rewards_are_written_to_action_tokens_alone() -> None:
    batch = [made("e0", "g", 2, 1.0), made("e1", "g", 1, 0.25), made("e2", "g", 2, None)]
    judgement = compute_advantages(batch, build_token_table(batch, CPU), recipe_of("dr_grpo"))
    assert advantages(batch) == [[0.375, 0.375], [-0.375], [0.0, 0.0]]
    assert batch[0].advantage.tolist() == [0, 0, 0.375, 0.375]
    assert batch[0].advantage.dtype == np.float32
    assert judgement.advantage.tolist() == [0.375, 0.375, -0.375, 0, 0]
    assert judgement.reward.tolist()[:2] == [1.0, 0.25]
    assert judgement.reward.isnan().tolist() == [False, False, True]
    assert judgement.counted.tolist() == [True, True, False]
    assert judgement.sources == [ExperienceSource.ROLLOUT] * 3
    assert judgement.returns is None


def test_advantages_compare_the_same_role_of_a_group_alone() -> None:
    """A mean over both roles, 0.75, would make every proposer's advantage positive."""
    batch = [made("e0", "g", 1, 2.0), made("e1", "g", 1, 0.25), made("e2", "g", 1, 1.0), made("e3", "g", 1, -0.25)]
    for each, role in zip(batch, ("proposer", "solver") * 2, strict=True):
        each.role = role
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("dr_grpo"))
    assert advantages(batch) == [[0.5], [0.25], [-0.5], [-0.25]]


def test_demonstrations_have_advantage_0_and_a_denominator_of_their_own() -> None:
    batch = [made("x", "x", 3, 5.0, ExperienceSource.EXPERT), *batch_of()]
    recipe = recipe_of("mix", mu=0.25)
    judgement = compute_advantages(batch, build_token_table(batch, CPU), recipe)
    assert judgement.counted.tolist() == [True] * 5
    assert advantages(batch)[0] == [0.0] * 3
    found = losses(recipe, batch, [0, 1, 2])
    assert found["sft"].tolist() == pytest.approx([-0.25 / 3] * 3 + [0.0] * 10)
    assert not found["policy"][:3].any()
    assert found["policy"][3:7].all()
    assert not found["policy"][7:].any()


@pytest.mark.parametrize("name", ["mix", "ppo"])
def test_without_any_rollout_there_is_nothing_to_compare(name: str) -> None:
    batch = [made("x", "x", 3, None, ExperienceSource.EXPERT), made("y", "y", 1, 1.0, ExperienceSource.EXPERT)]
    scores = PrecomputedScores(values=torch.ones(4))
    judgement = compute_advantages(batch, build_token_table(batch, CPU), recipe_of(name), scores)
    assert advantages(batch) == [[0.0] * 3, [0.0]]
    assert judgement.counted.tolist() == [True, True]
    assert judgement.returns is None


def test_what_is_imitated_counts_without_a_reward() -> None:
    batch = [made("x", "x", 3, None, ExperienceSource.EXPERT), made("y", "y", 1, None, ExperienceSource.EXPERT)]
    recipe = recipe_of("sft")
    assert compute_advantages(batch, build_token_table(batch, CPU), recipe).counted.tolist() == [True, True]
    assert losses(recipe, batch, [0, 1])["sft"].tolist() == pytest.approx([-0.25] * 4)


def test_distillation_counts_every_completion_whatever_its_reward() -> None:
    batch = batch_of(rewards=(1.0, None, 0.0, None))
    assert compute_advantages(batch, build_token_table(batch, CPU), recipe_of("distill")).counted.tolist() == [True] * 4


def test_steps_of_an_episode_have_its_advantage_and_rollouts_of_one_group_are_compared() -> None:
    batch = batch_of((1, 1, 1, 1), (1.0, 1.0, 0.0, None))
    for each, episode in zip(batch, "aabc", strict=True):
        each.episode, each.group = episode, "g"
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("dr_grpo"))
    assert advantages(batch) == [[0.5], [0.5], [-0.5], [0.0]]


def test_a_completion_without_the_greedy_ones_reward_does_not_count() -> None:
    batch = batch_of((1, 1), (1.0, 0.5))
    batch[0].greedy_reward = 0.75
    judgement = compute_advantages(batch, build_token_table(batch, CPU), recipe_of("remax"))
    assert advantages(batch) == [[0.25], [0.0]]
    assert judgement.counted.tolist() == [True, False]


def test_parts_of_the_reward_are_compared_where_they_are_there() -> None:
    batch = batch_of((1, 1, 1), (1.0, 0.0, 0.5))
    for each, parts in zip(batch, ({"a": 1.0}, {"a": 0.0, "b": 4.0}, {"b": 0.0, "a": None}), strict=True):
        each.group, each.reward_parts = "g", parts
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("gdpo", advantage={"whitened": False}))
    half = 0.5**0.5  # (1 - 1/2) over the standard deviation of 1 and 0
    assert [a[0] for a in advantages(batch)] == pytest.approx([half, -half + half, -half], abs=1e-5)


def test_gigpo_compares_steps_in_the_same_state_of_the_same_group() -> None:
    batch = batch_of((1, 1, 1, 1), (1.0, 1.0, 0.0, 0.0))
    for each, (episode, anchor) in zip(batch, ("as", "at", "bs", "bu"), strict=True):
        each.group = "g"
        each.episode, each.anchor, each.step_reward = episode, anchor, float(anchor == "t")
    recipe = recipe_of("gigpo", advantage={"gamma": 0.5, "scale": "none", "weight": 1.0})
    compute_advantages(batch, build_token_table(batch, CPU), recipe)
    # episodes: 1 and 0; in state s the returns are 1/2 and 0, in t and u there is nothing to compare with
    assert [a[0] for a in advantages(batch)] == pytest.approx([0.5 + 0.25, 0.5, -0.5 - 0.25, -0.5])


def test_a_step_without_a_reward_of_its_own_has_the_rollouts() -> None:
    batch = batch_of((1, 1), (1.0, 0.0))
    compute_advantages(
        batch, build_token_table(batch, CPU), recipe_of("gigpo", advantage={"scale": "none", "weight": 1.0})
    )
    assert advantages(batch) == [[1.0], [-1.0]]  # of the episodes, and of the steps in the prompt's state


def test_rewards_that_float32_cannot_tell_apart_are_compared() -> None:
    near = 1 - 2.0**-30
    batch = batch_of((1, 1), (1.0, near))
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("dr_grpo"))
    assert advantages(batch) == [[2.0**-31], [-(2.0**-31)]]
    batch[0].greedy_reward = near
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("remax"))
    assert advantages(batch) == [[2.0**-30], [0.0]]


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_plus_plus"])
def test_the_overlong_penalty_looks_at_each_completions_own_length(name: str) -> None:
    """At most 10 tokens, the last 4 of which cost 1/4 each; the demonstration in front is none of them."""
    batch = [made("x", "x", 9, None, ExperienceSource.EXPERT), *batch_of((8, 6, 10, 2), (1.0,) * 4)]
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of(name, overlong_buffer=4, kl=0.0))
    shaped = torch.tensor([0.5, 1.0, 0.0, 1.0])
    if name == "dr_grpo":
        expected = [-0.25, 0.25, -0.5, 0.5]
    else:
        tokens = shaped.repeat_interleave(torch.tensor([8, 6, 10, 2]))
        expected = ((shaped - tokens.mean()) / tokens.std()).tolist()
    assert [each[0] for each in advantages(batch)[1:]] == pytest.approx(expected, rel=1e-5)


def test_a_bare_reward_is_less_by_the_penalty_and_nothing_else() -> None:
    batch = batch_of((2, 1), (1.0, 0.5))
    recipe = recipe_of("reinforce", advantage={"baseline": "none"}, **KL)
    compute_advantages(batch, build_token_table(batch, CPU), recipe, scored(batch), kl_coefficient=1.0)
    assert advantages(batch) == [[0.25, 0.25], [-0.25]]


KL = {"kl": {"coefficient": 0.5, "where": "reward", "estimator": "k1"}}


def scored(batch: list[Experience], **more: Any) -> PrecomputedScores:
    """The policy is 1/4, 1/2, 3/4 ... nats above the reference, token by token of the batch."""
    policy = build_token_table(batch, CPU).rollout_logprob
    return PrecomputedScores(reference=policy - torch.arange(1, len(policy) + 1) / 4, policy=policy, **more)


def test_a_kl_in_the_reward_is_taken_off_each_rollouts_reward() -> None:
    """Rewards 1 and 0 less 1/2 times 1/4 + 1/2 + 3/4, and 1."""
    batch = batch_of((3, 1), (1.0, 0.0))
    table, recipe = build_token_table(batch, CPU), recipe_of("dr_grpo", **KL)
    judgement = compute_advantages(batch, table, recipe, scored(batch), kl_coefficient=0.5)
    a = ((1 - 0.75) - (0 - 0.5)) / 2
    assert advantages(batch) == [[a] * 3, [-a]]
    assert judgement.reward.tolist() == [1.0, 0.0]  # as it is shown, without the penalty
    compute_advantages(batch, table, recipe, scored(batch))
    assert advantages(batch) == [[0.5] * 3, [-0.5]]


def test_a_kl_in_the_reward_of_an_episode_is_that_of_all_its_steps() -> None:
    """And it is taken off the reward of the step that it arises in."""
    batch = batch_of((1, 1, 1, 1), (1.0, 1.0, 0.0, 0.0))
    for each, episode in zip(batch, "aabb", strict=True):
        each.group, each.episode, each.step_reward = "g", episode, each.reward / 2
    compute_advantages(
        batch, build_token_table(batch, CPU), recipe_of("dr_grpo", **KL), scored(batch), kl_coefficient=1.0
    )
    a = ((1 - 0.75) - (0 - 1.75)) / 2
    assert advantages(batch) == [[a], [a], [-a], [-a]]
    steps = recipe_of("gigpo", advantage={"scale": "none", "weight": 0.0}, **KL)
    compute_advantages(batch, build_token_table(batch, CPU), steps, scored(batch), kl_coefficient=1.0)
    assert advantages(batch) == [[a], [a], [-a], [-a]]


def test_a_penalty_that_makes_up_for_the_rewards_leaves_exactly_nothing() -> None:
    """0.4 times 1/4 and 1/2 is 0.1 and 0.2 in double precision, but not in single precision."""
    batch = batch_of((1, 1), (0.1, 0.2))
    compute_advantages(
        batch, build_token_table(batch, CPU), recipe_of("dr_grpo", **KL), scored(batch), kl_coefficient=0.4
    )
    assert advantages(batch) == [[0.0], [0.0]]


def test_a_kl_estimator_sees_the_log_probs_of_the_rollout() -> None:
    """`unbiased` weighs k3 by pi / pi_rollout."""
    batch = batch_of((1, 1), (0.0, 0.0))
    recipe = recipe_of("dr_grpo", kl={"coefficient": 0.5, "where": "reward", "estimator": "unbiased"})
    policy = build_token_table(batch, CPU).rollout_logprob + torch.tensor([0.5, 0.0])
    reference = policy - torch.tensor([0.25, 0.5])
    compute_advantages(
        batch,
        build_token_table(batch, CPU),
        recipe,
        PrecomputedScores(reference=reference, policy=policy),
        kl_coefficient=1.0,
    )
    k3 = [np.exp(-x) - 1 + x for x in (0.25, 0.5)]
    expected = (k3[1] - np.exp(0.5) * k3[0]) / 2
    assert [a[0] for a in advantages(batch)] == pytest.approx([expected, -expected], rel=1e-5)


def test_a_critic_and_a_kl_in_the_reward_give_returns_to_go() -> None:
    """With gamma and both lambdas 1: r less the penalties from here on, and less the value for the advantage."""
    batch = [made("x", "x", 1, None, ExperienceSource.EXPERT), *batch_of((2, 1, 1), (1.0, 0.5, None))]
    recipe = recipe_of("ppo", advantage={"whiten": False}, **KL)
    values = torch.tensor([9.0, 0.25, 0.5, 0.125, 4.0])
    judgement = compute_advantages(
        batch, build_token_table(batch, CPU), recipe, scored(batch, values=values), kl_coefficient=1.0
    )
    returns = [0.0, 1 - 0.5 - 0.75, 1 - 0.75, 0.5 - 1.0, 4.0]
    assert judgement.returns.tolist() == pytest.approx(returns)
    assert judgement.advantage.tolist() == pytest.approx([0.0, returns[1] - 0.25, returns[2] - 0.5, -0.625, 0.0])
    assert judgement.counted.tolist() == [True, True, True, False]
    without = recipe_of("ppo", advantage={"whiten": False})
    judgement = compute_advantages(batch, build_token_table(batch, CPU), without, PrecomputedScores(values=values))
    assert judgement.returns.tolist() == pytest.approx([0.0, 1.0, 1.0, 0.5, 4.0])


def test_a_kl_in_the_reward_of_token_advantages_is_that_of_the_tokens_still_to_come() -> None:
    batch = [made("x", "x", 1, None, ExperienceSource.EXPERT), *batch_of((2, 1, 1), (1.0, 0.0, None))]
    recipe = recipe_of("reinforce_plus_plus", **KL)
    judgement = compute_advantages(batch, build_token_table(batch, CPU), recipe, scored(batch), kl_coefficient=1.0)
    returns = torch.tensor([1 - 0.5 - 0.75, 1 - 0.75, -1.0])
    expected = ((returns - returns.mean()) / returns.std()).tolist()
    assert judgement.advantage.tolist() == pytest.approx([0.0, *expected, 0.0], rel=1e-5)
    assert judgement.counted.tolist() == [True, True, True, False]


def test_a_baseline_by_token_weighs_the_rollouts_own_tokens() -> None:
    """A token of probability p has the weight 1 - 2 p + the sum of squares; a token alone in its place gets 0."""
    batch = [made("x", "x", 1, None, ExperienceSource.EXPERT), *batch_of((2, 1), (1.0, 0.0))]
    p, squares = torch.tensor([0.125, 0.5, 0.5, 0.25]), torch.tensor([0.875, 0.5, 0.75, 0.25])
    scores = PrecomputedScores(policy=p.log(), collision=squares)
    compute_advantages(batch, build_token_table(batch, CPU), recipe_of("otb"), scores)
    baseline = 0.5 * 1.0 / (0.5 + 0.75)
    found = [a for each in advantages(batch) for a in each]
    assert found == pytest.approx([0.0, 1 - baseline, 0.0, -baseline], abs=1e-6)


def objective(
    recipe: Recipe, batch: list[Experience], scores: PrecomputedScores | None = None, **keys: Any
) -> StepLoss:
    table, scores = build_token_table(batch, CPU), scores or PrecomputedScores()
    judgement = compute_advantages(batch, table, recipe, scores)
    return StepLoss(recipe, table, judgement, scores, list(range(len(batch))), **keys)


def test_experiences_without_a_gradient_are_left_out_of_the_forward_pass() -> None:
    batch = batch_of((1, 1, 1, 1, 1, 1), (1.0, 0.0, 0.5, 0.5, 1.0, None))
    assert objective(recipe_of("grpo"), batch).learned == [0, 1]
    assert objective(recipe_of("raft"), batch).learned == [0, 2, 4]  # the best of each group, the first of equal ones
    assert objective(recipe_of("raft"), batch_of((1, 1), (1.0, -1.0))).learned == [0]
    assert objective(recipe_of("kimi"), batch).learned == [0, 1, 2, 3, 4]  # its term is not 0 where A is
    with_kl = recipe_of("grpo", kl=0.1)
    assert objective(with_kl, batch, kl_coefficient=0.1).learned == [0, 1, 2, 3, 4]
    assert objective(with_kl, batch).learned == [0, 1]  # a coefficient of 0
    assert objective(recipe_of("grpo", entropy=0.1), batch).learned == [0, 1, 2, 3, 4]
    table = build_token_table(batch, CPU)
    judgement = compute_advantages(batch, table, recipe_of("grpo"))
    assert StepLoss(recipe_of("grpo"), table, judgement, PrecomputedScores(), [1, 2]).learned == [1]


def test_weights_are_those_of_the_step_and_of_the_coefficient() -> None:
    recipe = recipe_of("chord", warmup=2, decay=4, peak=0.5, valley=0.25, kl=0.1)
    batch = [*batch_of(), made("x", "x", 1, None, ExperienceSource.EXPERT)]
    for step, share in ((0, 0.0), (1, 0.25), (2, 0.5), (6, 0.25)):
        found = objective(recipe, batch, step=step, kl_coefficient=0.5)
        weights = dict(zip([term.name for term in recipe.terms], found.weights, strict=True))
        assert weights == {"policy": 1 - share, "kl": 0.5 * (1 - share), "sft": share}
    first = objective(recipe, batch, step=0)
    assert first.learned == [0, 1, 2, 3]  # nothing of the demonstration yet
    assert objective(recipe, batch).weights == objective(recipe, batch, step=0).weights
    adaptive = recipe_of("skywork_or1", entropy=0.1, entropy_control={"target": 1.0})
    assert objective(adaptive, batch).weights == [1.0, 0.0]
    assert objective(adaptive, batch, entropy_coefficient=0.25).weights == [1.0, -0.25]
    [micro] = build_micro_batches(batch, build_token_table(batch, CPU), range(5), 100, CPU)
    inputs, tokens = first.inputs(micro, torch.zeros(11), torch.zeros(11), ExperienceSource.EXPERT)
    assert first.terms(inputs, tokens, ExperienceSource.EXPERT) == {}  # what has no weight is not computed


def test_a_term_sees_each_tokens_own_numbers() -> None:
    """Also where a row holds tokens of several sources, in another order than the batch."""
    batch = [
        made("x", "x", 1, None, ExperienceSource.EXPERT),
        made("e0", "g", 1, 1.0),
        made("e1", "g", 3, 0.0),
        made("y", "y", 2, None, ExperienceSource.EXPERT),
    ]
    table, recipe = build_token_table(batch, CPU), recipe_of("mix", mu=0.5)
    a = torch.arange(7.0)
    scores = PrecomputedScores(old=a / 100, reference=a / 10)
    whole = StepLoss(recipe, table, compute_advantages(batch, table, recipe, scores), scores, [0, 1, 2, 3], version=4)
    [micro] = build_micro_batches(batch, table, range(4), 100, CPU)
    own = table.rollout_logprob[micro.tokens] - 1
    inputs, tokens = whole.inputs(
        micro, own, micro.tokens.float(), ExperienceSource.ROLLOUT, divergence=micro.tokens * 2.0
    )
    assert sorted(tokens.tolist()) == [1, 2, 3, 4]
    assert torch.equal(inputs.logprob, table.rollout_logprob[tokens] - 1)
    assert torch.equal(inputs.rollout_logprob, table.rollout_logprob[tokens])
    assert torch.equal(inputs.old_logprob, tokens / 100)
    assert torch.equal(inputs.reference_logprob, tokens / 10)
    assert torch.equal(inputs.entropy, tokens.float())
    assert torch.equal(inputs.divergence, tokens * 2.0)
    by_token = {1: (1.0, 2, 0.5**0.5), 2: (0.0, 2, -(0.5**0.5)), 3: (0.0, 1, -(0.5**0.5)), 4: (0.0, 0, -(0.5**0.5))}
    for n, token in enumerate(tokens.tolist()):
        reward, stale, advantage = by_token[token]
        assert (inputs.reward[n], inputs.staleness[n]) == (reward, stale)
        assert float(inputs.advantage[n]) == pytest.approx(advantage, rel=1e-5)
        assert micro.experiences[int(inputs.sequence[n])] == int(table.experience[token])
    assert len(set(inputs.group.tolist())) == 1
    precise = whole.inputs(micro, own.double(), own.double(), ExperienceSource.ROLLOUT)[0]
    assert whole.terms(precise, tokens, ExperienceSource.ROLLOUT)["policy"][1].dtype == torch.float64
    experts, tokens = whole.inputs(micro, own, own, ExperienceSource.EXPERT)
    assert sorted(tokens.tolist()) == [0, 5, 6]
    assert experts.divergence is None
    assert set(whole.terms(experts, tokens, ExperienceSource.EXPERT)) == {"sft"}
    assert whole.terms(experts, tokens[:0], ExperienceSource.EXPERT) == {}


def test_tokens_are_as_stale_as_updates_came_since_and_never_newer_than_the_policy() -> None:
    batch = batch_of((4, 1), (1.0, 0.0))  # versions 2 to 5, and 2
    recipe = recipe_of("grpo")
    whole = objective(recipe, batch, version=4)
    table = build_token_table(batch, CPU)
    [micro] = build_micro_batches(batch, table, range(2), 100, CPU)
    inputs, tokens = whole.inputs(micro, torch.zeros(5), torch.zeros(5), ExperienceSource.ROLLOUT)
    stale = dict(zip(tokens.tolist(), inputs.staleness.tolist(), strict=True))
    assert stale == {0: 2, 1: 1, 2: 0, 3: 0, 4: 2}
    for each in batch:
        each.versions = np.zeros_like(each.versions)
    fresh = objective(recipe, batch)
    assert not fresh.inputs(micro, torch.zeros(5), torch.zeros(5), ExperienceSource.ROLLOUT)[0].staleness.any()


def test_old_log_probs_are_the_policys_own_without_gradient_unless_said_otherwise() -> None:
    batch = batch_of((2, 2), (1.0, 0.0))  # versions 2 and 3, log-probs -1/4 and -3/8
    table, recipe = build_token_table(batch, CPU), recipe_of("grpo")
    [micro] = build_micro_batches(batch, table, range(2), 100, CPU)
    logprob = torch.full((4,), -1.0, requires_grad=True)
    own = objective(recipe, batch, version=3).inputs(micro, logprob, logprob, ExperienceSource.ROLLOUT)[0]
    assert torch.equal(own.old_logprob, logprob)
    assert not own.old_logprob.requires_grad
    assert own.reference_logprob is None
    between = objective(recipe, batch, PrecomputedScores(interpolated=True), version=3)
    old = between.inputs(micro, logprob, logprob, ExperienceSource.ROLLOUT)[0].old_logprob
    half = (-0.25 - 1.0) / 2  # a token one update old is halfway between rollout and policy
    assert old[micro.tokens.argsort()].tolist() == [half, -0.375, half, -0.375]
    both = PrecomputedScores(old=torch.zeros(4), interpolated=True)
    assert (
        not objective(recipe, batch, both)
        .inputs(micro, logprob, logprob, ExperienceSource.ROLLOUT)[0]
        .old_logprob.any()
    )


def mixed() -> list[Experience]:
    """Two demonstrations around a group of rollouts: one has no reward, one a single token and one none."""
    numbered = enumerate(zip((2, 3, 1, 0, 2), (1.0, None, 0.0, 0.0, 1.0), strict=True))
    rollouts = [made(f"e{n}", "g", length, reward) for n, (length, reward) in numbered]
    first, last = (made(id, id, length, None, ExperienceSource.EXPERT) for id, length in (("x", 1), ("y", 2)))
    return [first, *rollouts, last]


PART = [0, 1, 2, 3, 4, 6]  #: of these: all but the last rollout
JUDGED = [1, 2, 6]  #: tokens of the part's rollouts that have a reward, of 11


@pytest.mark.parametrize(("name", "proximal"), [("grpo", "recompute"), ("grpo", "own"), ("kl_cov", "interpolate")])
def test_masks_and_selection_see_the_judged_tokens_of_the_part(name: str, proximal: str) -> None:
    batch, seen = mixed(), list[MaskInputs]()
    table, at = build_token_table(batch, CPU), torch.arange(11.0)
    own, before = -at / 16, -at.flip(0) / 10

    def note(inputs: MaskInputs) -> Tensor:
        seen.append(inputs)
        return inputs.draw < 0

    recipe = replace(recipe_of(name), masks=(note,), selection=note)
    scores = PrecomputedScores(old=before if proximal == "recompute" else None, interpolated=proximal == "interpolate")
    judgement = compute_advantages(batch, table, recipe, scores)
    whole = StepLoss(recipe, table, judgement, scores, PART, version=4)
    assert whole.counted == [1, 3]
    whole.choose(own, at + 1, at + 2, at + 3)
    assert len(seen) == 2
    for inputs in seen:
        old, dropped = [], []
        for n, stale in zip(JUDGED, (2, 1, 2), strict=True):
            now, recorded, a = (float(x[n]) for x in (own, table.rollout_logprob, judgement.advantage))
            between = recorded + stale / (stale + 1) * (now - recorded)
            old.append({"recompute": float(before[n]), "own": now, "interpolate": between}[proximal])
            ratio = exp(now - old[-1])
            dropped.append(name == "grpo" and (ratio > 1.2 if a > 0 else ratio < 0.8))
        assert inputs.old_logprob.tolist() == pytest.approx(old)
        assert inputs.dropped.dtype == torch.bool
        assert inputs.dropped.tolist() == dropped
        assert any(dropped) == (proximal == "recompute")
        assert torch.equal(inputs.logprob, own[JUDGED])
        assert torch.equal(inputs.rollout_logprob, table.rollout_logprob[JUDGED])
        assert torch.equal(inputs.advantage, judgement.advantage[JUDGED])
        assert torch.equal(inputs.entropy, at[JUDGED] + 1)
        assert torch.equal(inputs.expected_discriminant, at[JUDGED] + 2)
        assert torch.equal(inputs.draw, at[JUDGED] + 3)
        assert inputs.sequence.tolist() == [1, 1, 3]


def chosen(whole: StepLoss, batch: list[Experience]) -> tuple[dict[int, bool], dict[int, bool]]:
    """What a step says of every token, kept and selected; one experience of the batch in a row."""
    table = build_token_table(batch, CPU)
    kept, selected = dict[int, bool](), dict[int, bool]()
    for micro in build_micro_batches(batch, table, range(len(batch)), 1, CPU):
        logprob = table.rollout_logprob[micro.tokens]
        for source in ExperienceSource:
            inputs, tokens = whole.inputs(micro, logprob, logprob, source)
            for found, marks in ((kept, inputs.kept), (selected, inputs.selected)):
                if marks is not None:
                    found |= zip(tokens.tolist(), marks.tolist(), strict=True)
    return kept, selected


def test_what_is_chosen_holds_for_judged_tokens_and_the_rest_is_kept_and_not_selected() -> None:
    batch = mixed()
    recipe = replace(
        recipe_of("kl_cov"),
        masks=(lambda inputs: inputs.draw < 0.75, lambda inputs: inputs.entropy < 0.75),
        selection=lambda inputs: inputs.draw > 0.25,
    )
    table = build_token_table(batch, CPU)
    judgement = compute_advantages(batch, table, recipe)
    whole = StepLoss(recipe, table, judgement, PrecomputedScores(), PART)
    assert chosen(whole, batch) == (dict.fromkeys(range(11), True), dict.fromkeys(range(11), False))
    draw, entropy = torch.ones(11), torch.ones(11)
    draw[JUDGED], entropy[JUDGED] = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.5, 1.0, 0.5])
    whole.choose(torch.zeros(11), entropy, None, draw)
    kept = {n: n not in JUDGED or bool(draw[n] < 0.75 and entropy[n] < 0.75) for n in range(11)}
    assert [kept[n] for n in JUDGED] == [True, False, False]
    assert chosen(whole, batch) == (kept, {n: n in JUDGED and bool(draw[n] > 0.25) for n in range(11)})
    assert table.imitated.tolist() == [n in (0, 9, 10) for n in range(11)]
    plain = StepLoss(recipe_of("grpo"), table, judgement, PrecomputedScores(), PART)
    plain.choose(torch.zeros(11), entropy, None, draw)
    assert chosen(plain, batch) == ({}, {})


def test_masks_and_selection_are_not_asked_about_a_step_without_judged_tokens() -> None:
    batch = mixed()

    def never(inputs: MaskInputs) -> Tensor:
        raise AssertionError(inputs)

    recipe, table = replace(recipe_of("kl_cov"), masks=(never,), selection=never), build_token_table(batch, CPU)
    whole = StepLoss(recipe, table, compute_advantages(batch, table, recipe), PrecomputedScores(), [0, 2, 4])
    assert whole.counted == []
    whole.choose(torch.zeros(11), torch.zeros(11), None, torch.zeros(11))
    assert chosen(whole, batch) == (dict.fromkeys(range(11), True), dict.fromkeys(range(11), False))


def test_kto_compares_each_completion_with_the_baseline_of_the_step() -> None:
    batch = [made(f"e{n}", f"g{n}", n + 1, reward, ExperienceSource.PREFERENCE) for n, reward in enumerate((1.0, -1.0))]
    table = build_token_table(batch, CPU)
    scores = PrecomputedScores(reference=table.rollout_logprob - 0.5)
    whole = objective(recipe_of("kto", beta=2.0), batch, scores)
    [micro] = build_micro_batches(batch, table, range(2), 100, CPU)
    for baseline in (0.0, 0.25):
        whole.kl_baseline = torch.tensor(baseline)
        own = table.rollout_logprob[micro.tokens]
        inputs, tokens = whole.inputs(micro, own, own, ExperienceSource.PREFERENCE)
        _, value = whole.terms(inputs, tokens, ExperienceSource.PREFERENCE)["kto"]
        desired, undesired = 2 * (0.5 - baseline), 2 * (2 * 0.5 - baseline)
        assert float(value) == pytest.approx((1 / (1 + exp(desired)) + 1 / (1 + exp(-undesired))) / 2)
