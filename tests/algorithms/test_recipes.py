"""Recipes: what each algorithm's options turn into."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter

from rollmill.algorithms import (
    AdvantageInputs,
    LossInputs,
    LossTerm,
    Recipe,
    TokenAdvantageInputs,
    build_recipe,
)
from rollmill.algorithms.aggregation import token_mean
from rollmill.algorithms.policy_recipes import _advantage_by_episode
from rollmill.config.algorithms import AlgorithmConfig, known_algorithms
from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.types import ExperienceSource


def _recipe(**options: object) -> object:
    return build_recipe(TypeAdapter(AlgorithmConfig).validate_python(options), max_new_tokens=10)


def _inputs(n: int) -> LossInputs:
    zeros = torch.zeros(n)
    return LossInputs(
        logprob=zeros - 1,
        old_logprob=zeros - 1,
        rollout_logprob=zeros - 1,
        advantage=zeros + 2,
        reward=zeros + 1,
        entropy=zeros + 0.5,
        reference_logprob=zeros - 1,
        staleness=zeros,
        sequence=zeros.long(),
        group=zeros.long(),
        kept=zeros == 0,
        selected=zeros == 0,
    )


def _rewards(rewards: list[float], groups: list[int], lengths: list[int]) -> AdvantageInputs:
    values, n = torch.tensor(rewards).double(), len(rewards)
    return AdvantageInputs(
        rewards=values,
        groups=torch.tensor(groups),
        lengths=torch.tensor(lengths),
        episodes=torch.arange(n),
        anchors=torch.tensor(groups),
        greedy_rewards=torch.full((n,), torch.nan).double(),
        step_rewards=values,
        parts={"exact": values},
    )


ROLLING = [name for name, options in known_algorithms().items() if issubclass(options, PolicyGradientOptions)]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce", "rloo"])
def test_policy_gradient_terms(name: str) -> None:
    recipe = _recipe(name=name)
    assert recipe.name == name
    assert [t.name for t in recipe.terms] == ["policy"]
    assert not recipe.uses_reference
    assert not recipe.uses_entropy
    assert recipe.terms[0].source is ExperienceSource.ROLLOUT
    full = _recipe(name=name, kl=0.2, entropy=0.01, corrections=["tis"])
    assert {t.name: t.weight for t in full.terms} == {"policy": 1, "kl": 1, "entropy": -0.01}
    assert [t.name for t in full.terms if t.is_kl] == ["kl"]
    assert full.kl.coefficient == 0.2
    assert full.uses_reference
    assert full.uses_entropy
    assert full.proximal == "recompute"
    assert [t.fn(_inputs(2)).tolist() for t in full.terms] == [[-2, -2], [0, 0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", [1 / 4, 1 / 12]), ("dr_grpo", [1 / 20] * 2), ("dapo", [1 / 8] * 2), ("rloo", [1 / 2] * 2)],
)
def test_default_aggregations(name: str, expected: list[float]) -> None:
    weights = _recipe(name=name).terms[0].aggregate(torch.tensor([2, 6]))
    assert weights.tolist() == pytest.approx(expected)


def test_mix_is_convex_over_the_whole_grpo_loss() -> None:
    terms = {t.name: t for t in _recipe(name="mix", mu=0.1, kl=0.5).terms}
    assert {n: t.weight for n, t in terms.items()} == pytest.approx({"policy": 0.9, "kl": 0.9, "sft": 0.1})
    assert terms["sft"].source is ExperienceSource.EXPERT
    assert terms["policy"].source is ExperienceSource.ROLLOUT


def test_sft_needs_no_rewards() -> None:
    recipe = _recipe(name="sft", aggregation="sequence-mean")
    assert recipe.advantage is None
    inputs = _inputs(1)
    elsewhere = inputs._replace(rollout_logprob=inputs.logprob - 3, reference_logprob=inputs.logprob - 5)
    assert recipe.terms[0].fn(elsewhere).tolist() == [1]
    assert (recipe.terms[0].weight, recipe.terms[0].source) == (1, ExperienceSource.EXPERT)
    assert recipe.terms[0].aggregate(torch.tensor([2, 5])).tolist() == pytest.approx([1 / 4, 1 / 10])


def test_dapo_penalises_length_before_comparing() -> None:
    inputs = _rewards([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [8, 10, 3, 2])
    plain = _recipe(name="dapo").advantage(inputs)
    assert plain.values.tolist() == [0, 0, 0, 0]
    assert not plain.counted.any()
    shaped = _recipe(name="dapo", overlong_buffer=4).advantage(inputs)  # penalties -.5, -1, 0, 0
    assert shaped.counted.tolist() == [True, True, False, False]
    assert shaped.values[0] == -shaped.values[1] > 0
    assert _recipe(name="dapo", drop_uniform_groups=False).advantage(inputs).counted.all()


BY_ROLLOUT = sorted(
    name for name in set(ROLLING) - {"ppo", "gigpo"} if _recipe(name=name).advantage is not None and name != "gdpo"
)


@pytest.mark.parametrize("name", BY_ROLLOUT)
def test_a_rollout_that_forked_counts_once_and_each_of_its_branches_has_its_advantage(name: str) -> None:
    alone = _rewards([1.0, 0.25, 0.0], [0, 0, 0], [8, 6, 3])
    forked = _rewards([1.0, 1.0, 0.25, 1.0, 0.0], [0, 0, 0, 0, 0], [4, 2, 6, 2, 3])
    forked = forked._replace(episodes=torch.tensor([7, 7, 3, 7, 5]))
    recipe = _recipe(name=name)
    assert recipe.advantage is not None
    expected = recipe.advantage(alone._replace(greedy_rewards=torch.zeros(3).double())).values
    got = recipe.advantage(forked._replace(greedy_rewards=torch.zeros(5).double())).values
    torch.testing.assert_close(got, expected[[0, 0, 1, 0, 2]])


def test_branches_that_an_operator_changed_have_the_mean_of_their_rewards() -> None:
    nan = float("nan")
    forked = _rewards([1.0, 0.5, 0.0, nan, 0.1, 0.1, nan, 0.1], [0] * 8, [1] * 8)
    forked = forked._replace(episodes=torch.tensor([7, 7, 3, 3, 5, 5, 9, 5]))
    recipe = _recipe(name="dr_grpo")
    assert recipe.advantage is not None
    got = recipe.advantage(forked)
    expected = recipe.advantage(_rewards([0.75, 0.0, nan, 0.1], [0] * 4, [2] * 4)).values[[0, 0, 1, 1, 3, 3, 2, 3]]
    torch.testing.assert_close(got.values, expected, equal_nan=True)
    assert got.counted.tolist() == [True, True, True, False, True, True, False, True]


def test_the_group_s_mean_of_reinforce_plus_plus_counts_a_rollout_once() -> None:
    """Rewards 1 and 0: their mean is a half, however many branches the first has."""
    recipe = _recipe(name="reinforce_plus_plus_baseline")
    assert recipe.token_advantage is not None
    forked = _rewards([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [1, 1, 1, 1])._replace(episodes=torch.tensor([2, 2, 2, 5]))
    got = recipe.token_advantage(forked, torch.arange(4), TokenAdvantageInputs()).values
    centred = torch.tensor([0.5, 0.5, 0.5, -0.5]).double()
    torch.testing.assert_close(got, (centred - centred.mean()) / centred.std())


def test_unjudged_experiences_are_not_counted() -> None:
    inputs = _rewards([1.0, float("nan"), 0.0], [0, 0, 0], [8, 10, 3])
    for name in set(ROLLING) - {"ppo"}:
        recipe = _recipe(name=name)
        if recipe.advantage is None:
            half = torch.full((3,), 0.5)
            scores = TokenAdvantageInputs(logprob=half.log(), collision=half)
            result = recipe.token_advantage(inputs, torch.arange(3), scores)
        else:
            result = recipe.advantage(inputs._replace(greedy_rewards=torch.zeros(3).double()))
        assert result.counted.tolist() == [True, False, True]
        assert result.values[1] == 0
        assert result.values.isfinite().all()


@pytest.mark.parametrize("name", ROLLING)
def test_every_algorithm_gives_finite_terms_and_gradients(name: str) -> None:
    recipe = _recipe(name=name, kl=0.1, entropy=0.01)
    for term in recipe.terms:
        inputs = _inputs(5)._replace(logprob=(torch.zeros(5) - 1.1).requires_grad_())
        values = term.fn(inputs)
        assert values.shape == (5,)
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), inputs.logprob)
            assert gradient.isfinite().all()
        assert values.isfinite().all()


def test_chords_share_follows_its_schedule() -> None:
    terms = {t.name: t for t in _recipe(name="chord", warmup=10, decay=100, peak=0.5, valley=0.1).terms}
    shares = [terms["sft"].weight_at(step) for step in (0, 5, 10, 60, 110, 500)]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, 0.1])
    assert [terms["policy"].weight_at(step) for step in (0, 10)] == [1, 0.5]


def test_corrections_multiply_and_leave_other_terms_alone() -> None:
    inputs = _inputs(2)._replace(rollout_logprob=torch.tensor([-1.5, -4.0]), logprob=torch.tensor([-1.0, -1.0]))
    corrections = [{"name": "tis", "cap": 2.0}, {"name": "mis", "low": 0.5, "high": 5.0}]
    plain, corrected = _recipe(name="grpo", kl=0.1), _recipe(name="grpo", kl=0.1, corrections=corrections)
    factors = corrected.terms[0].fn(inputs) / plain.terms[0].fn(inputs)
    e = 0.5
    assert factors.tolist() == pytest.approx([torch.e**e * torch.e**e, 0])
    assert torch.equal(corrected.terms[1].fn(inputs), plain.terms[1].fn(inputs))


def test_parts_are_normalised_with_the_weights_of_their_rewards() -> None:
    inputs = _rewards([0.0] * 4, [0, 0, 0, 0], [1, 1, 1, 1])
    a, b = torch.tensor([1.0, 0, 0, 0]).double(), torch.tensor([0, 9.0, 0, 0]).double()
    inputs = inputs._replace(parts={"math": a, "mine/b": b})
    options = TypeAdapter(AlgorithmConfig).validate_python({"name": "gdpo", "advantage": {"whitened": False}})
    recipe = build_recipe(options, max_new_tokens=10, reward_weights={"math": 1.0, "mine": 2.0})
    assert recipe.advantage is not None
    values = recipe.advantage(inputs).values
    assert values.tolist() == pytest.approx([1.5 - 1, -0.5 + 3, -1.5, -1.5], abs=1e-5)


def test_parts_that_cancel_are_not_a_uniform_group() -> None:
    inputs = _rewards([1.0] * 4, [0, 0, 0, 0], [1, 1, 1, 1])
    a = torch.tensor([1.0, 1, 0, 0]).double()
    for b, counted in ((1 - a, True), (torch.ones(4).double(), True)):
        recipe = _recipe(name="gdpo", drop_uniform_groups=True)
        assert recipe.advantage(inputs._replace(parts={"a": a, "b": b})).counted.tolist() == [counted] * 4
    uniform = {"a": torch.ones(4).double(), "b": torch.zeros(4).double()}
    assert not recipe.advantage(inputs._replace(parts=uniform)).counted.any()


def test_raft_learns_from_what_was_accepted_alone() -> None:
    [term] = _recipe(name="raft").terms
    inputs = _inputs(3)._replace(advantage=torch.tensor([1.0, 0.0, -1.0]))
    assert term.fn(inputs).tolist() == [1, 0, 0]
    assert term.uses_advantage
    assert term.only_positive


def _pairs() -> LossInputs:
    """Two pairs: group 0 is sequences 0 (rejected) and 2 (chosen, two tokens), group 1 is 1 (chosen) and 3."""
    sequence = torch.tensor([0, 1, 2, 2, 3])
    logprob = torch.tensor([-1.0, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)
    return _inputs(5)._replace(
        logprob=logprob,
        reference_logprob=torch.tensor([-1.5, -1.0, -3.5, -5.5, -5.0], dtype=torch.float64),
        rollout_logprob=logprob - 9,
        reward=torch.tensor([0.0, 1, 1, 1, 0], dtype=torch.float64),
        sequence=sequence,
        group=torch.tensor([0, 1, 0, 0, 1]),
    )


#: Log-ratios of the chosen and of the rejected completion of each pair.
CHOSEN, REJECTED = torch.tensor([2.0, -1.0]).double(), torch.tensor([0.5, -1.0]).double()


def test_dpo_compares_the_completions_of_a_pair() -> None:
    beta, e = 0.4, 0.1
    [term] = _recipe(name="dpo", beta=beta, label_smoothing=e).terms
    assert (term.name, term.source, term.uses_reference, term.weight) == ("dpo", ExperienceSource.PREFERENCE, True, 1)
    h = beta * (CHOSEN - REJECTED)
    loss = -(1 - e) * torch.nn.functional.logsigmoid(h) - e * torch.nn.functional.logsigmoid(-h)
    torch.testing.assert_close(term.fn(_pairs()), loss[[0, 1, 0, 0, 1]])
    # on the tokens of both completions, so that a mean over sequences is the mean over pairs
    assert term.aggregate(torch.tensor([1, 1, 2, 1])).tolist() == [0.25, 0.25, 0.125, 0.25]
    [ipo] = _recipe(name="dpo", loss="ipo", beta=beta).terms
    expected = (CHOSEN - REJECTED - 1 / (2 * beta)) ** 2
    torch.testing.assert_close(ipo.fn(_pairs()), expected[[0, 1, 0, 0, 1]])
    [normalised] = _recipe(name="dpo", loss="ipo", beta=beta, normalise=True).terms
    means = torch.tensor([1.0, -1.0]).double()  # the chosen completion of two tokens
    torch.testing.assert_close(normalised.fn(_pairs()), ((means - REJECTED - 1.25) ** 2)[[0, 1, 0, 0, 1]])


def test_dpo_measures_how_far_apart_the_completions_of_a_pair_are() -> None:
    recipe = _recipe(name="dpo", beta=0.4)
    assert recipe.keep_groups_together
    assert recipe.measures is not None
    found = {name: values.tolist() for name, values in recipe.measures(_pairs()).items()}
    assert found.pop("pairs/accuracy") == [1.0, 0.5]  # the second pair is a draw
    expected = {"pairs/margin": [0.6, 0.0], "pairs/chosen": [0.8, -0.4], "pairs/rejected": [0.2, -0.4]}
    for name, values in expected.items():
        assert found.pop(name) == pytest.approx(values)
    assert not found
    swapped = _pairs()._replace(reward=1 - _pairs().reward)
    assert recipe.measures(swapped)["pairs/accuracy"].tolist() == [0.0, 0.5]


def test_dpo_with_sft_imitates_the_chosen_completions() -> None:
    """Twice their loss: the mean over pairs is twice the mean over completions."""
    [_, term] = _recipe(name="dpo", sft=0.25).terms
    assert (term.name, term.source, term.weight) == ("sft", ExperienceSource.PREFERENCE, 0.25)
    assert term.fn(_pairs()).tolist() == [0, 4, 6, 8, 0]
    assert term.aggregate(torch.tensor([1, 1, 2, 1])).tolist() == [0.25, 0.25, 0.125, 0.25]


def test_a_kl_in_the_loss_goes_from_the_policy_to_the_reference_by_the_rollout() -> None:
    inputs = _inputs(1)._replace(
        reference_logprob=torch.tensor([-1.5]), rollout_logprob=torch.tensor([-2.0]), old_logprob=torch.tensor([-3.0])
    )
    for name, expected in (
        ("k1", 0.5),
        ("k3", math.exp(-0.5) + 0.5 - 1),
        ("unbiased", math.e * (math.exp(-0.5) - 0.5)),
    ):
        [_, term] = _recipe(name="dr_grpo", kl={"coefficient": 0.1, "estimator": name}).terms
        assert term.fn(inputs).item() == pytest.approx(expected, rel=1e-5)
        assert (term.is_kl, term.uses_reference, term.weight) == (True, True, 1.0)
    assert [term.name for term in _recipe(name="dr_grpo", kl={"coefficient": 0.1, "where": "reward"}).terms] == [
        "policy"
    ]


def test_old_log_probs_are_computed_anew_where_a_correction_needs_them() -> None:
    assert _recipe(name="grpo").proximal == "rollout"
    assert _recipe(name="grpo", corrections=["tis"]).proximal == "recompute"
    assert _recipe(name="grpo", corrections=["tis"], proximal="interpolate").proximal == "interpolate"
    assert _recipe(name="grpo", proximal="recompute").proximal == "recompute"


def test_terms_say_where_they_are_zero() -> None:
    said = {name: _recipe(name=name).terms[0] for name in ("grpo", "kimi", "raft")}
    assert {name: (term.uses_advantage, term.only_positive) for name, term in said.items()} == {
        "grpo": (True, False),
        "kimi": (False, False),
        "raft": (True, True),
    }


def test_chord_multiplies_the_entropy_bonus_by_its_share_and_may_weigh_tokens() -> None:
    schedule = {"warmup": 4, "decay": 4, "peak": 0.5, "valley": 0.1}
    terms = {term.name: term for term in _recipe(name="chord", entropy=0.2, **schedule).terms}
    assert [terms["entropy"].weight_at(step) for step in (0, 2, 4)] == pytest.approx([-0.2, -0.15, -0.1])
    for weighed, expected in ((False, 1.0), (True, math.exp(-1) * (1 - math.exp(-1)))):
        terms = {term.name: term for term in _recipe(name="chord", token_weights=weighed, **schedule).terms}
        assert terms["sft"].fn(_inputs(1)).item() == pytest.approx(expected)
        assert terms["sft"].aggregate(torch.tensor([3, 1])).tolist() == [0.25, 0.25]


def test_ppo_has_a_critic_and_others_have_none() -> None:
    recipe, other = _recipe(name="ppo", reset_optimizer=True), _recipe(name="grpo")
    assert recipe.critic is not None
    assert recipe.critic_advantage is not None
    assert (recipe.advantage, recipe.token_advantage) == (None, None)
    assert recipe.reset_optimizer
    assert not other.reset_optimizer
    assert (other.critic, other.critic_advantage, other.token_advantage) == (None, None, None)
    assert other.advantage is not None


def test_ppos_critic_has_a_lambda_of_its_own_and_missing_rewards_do_not_shift_advantages() -> None:
    options = {"gamma": 0.9, "lam": 0.5, "critic_lam": 0.25}
    values, sequence = torch.tensor([0.5, 0.25, 1.0, 2.0]).double(), torch.tensor([0, 0, 1, 2])
    rewards = torch.tensor([0.0, 1.0, 0.5, float("nan")]).double()
    last, other = 1 - 0.25, 0.5 - 1.0
    first = 0.9 * 0.25 - 0.5
    plain = _recipe(name="ppo", advantage={**options, "whiten": False}).critic_advantage(values, rewards, sequence)
    assert plain.advantages.tolist() == pytest.approx([first + 0.45 * last, last, other, 0.0])
    assert plain.returns.tolist() == pytest.approx([0.5 + first + 0.225 * last, 1.0, 0.5, 2.0])
    white = _recipe(name="ppo", advantage={**options, "whiten": True}).critic_advantage(values, rewards, sequence)
    judged = plain.advantages[:3]
    torch.testing.assert_close(white.advantages[:3], (judged - judged.mean()) / judged.std())
    assert white.advantages[3] == 0
    assert torch.equal(white.returns, plain.returns)
    by_length = {"gamma": 1.0, "length_alpha": 1.0, "whiten": False}  # lambda is 1/2 for two tokens
    adaptive = _recipe(name="ppo", advantage=by_length).critic_advantage(values, rewards, sequence)
    assert adaptive.advantages[0].item() == pytest.approx((0.25 - 0.5) + 0.5 * last)


@pytest.mark.parametrize("drop", [True, False])
def test_uniform_groups_of_token_advantages_count_unless_they_are_dropped(drop: bool) -> None:
    inputs = _rewards([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], [1, 1, 1, 1])
    recipe = _recipe(name="reinforce_plus_plus", kl=0.0, drop_uniform_groups=drop)
    assert recipe.token_advantage(inputs, torch.arange(4), TokenAdvantageInputs()).counted.tolist() == [
        not drop,
        not drop,
        True,
        True,
    ]


def test_token_advantages_have_the_options_of_the_file() -> None:
    inputs = _rewards([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1], [1, 1, 1, 1])
    centred = {"none": torch.tensor([1.0, 0, 3, 0]), "group": torch.tensor([0.5, -0.5, 1.5, -1.5])}
    for baseline, values in centred.items():
        for ddof in (0, 1):
            recipe = _recipe(name="reinforce_plus_plus", kl=0.0, advantage={"baseline": baseline, "ddof": ddof})
            expected = (values - values.mean()) / values.std(correction=ddof)
            got = recipe.token_advantage(inputs, torch.arange(4), TokenAdvantageInputs()).values
            torch.testing.assert_close(got.float(), expected)
    forked = _rewards([1.0, 1.0, 0.0, 3.0, 0.0], [0, 0, 0, 1, 1], [1] * 5)
    forked = forked._replace(episodes=torch.tensor([4, 4, 1, 2, 3]))
    recipe = _recipe(name="reinforce_plus_plus_baseline", kl=0.0)
    values = torch.tensor([0.5, 0.5, -0.5, 1.5, -1.5]).double()
    got = recipe.token_advantage(forked, torch.arange(5), TokenAdvantageInputs()).values
    torch.testing.assert_close(got, (values - values.mean()) / values.std())


def test_a_rollout_that_forked_is_as_long_as_its_branches_together_and_has_each_parts_mean() -> None:
    """Lengths are seen by users' advantages, parts by GDPO."""
    forked = _rewards([1.0, 1.0, 0.0], [0, 0, 0], [4, 2, 3])._replace(episodes=torch.tensor([7, 7, 3]))
    parts = {"a": torch.tensor([1.0, 0.5, 0.0]).double(), "b": torch.tensor([0.0, 0.0, 2.0]).double()}
    seen: list[AdvantageInputs] = []

    def watching(inputs: AdvantageInputs) -> torch.Tensor:
        seen.append(inputs)
        return inputs.rewards

    values = _advantage_by_episode(watching, forked._replace(parts=parts))
    assert values.tolist() == [1, 1, 0]
    [one] = seen
    assert one.lengths.tolist() == [3, 6]  # by the numbers of the episodes
    assert {name: part.tolist() for name, part in one.parts.items()} == {"a": [0, 0.75], "b": [2, 0]}
    assert (one.rewards.tolist(), one.groups.tolist()) == ([0, 1], [0, 0])


def test_the_overlong_penalty_is_a_part_of_the_reward() -> None:
    """Of weight 1, as every part that is given none."""
    inputs = _rewards([0.0] * 3, [0] * 3, [10, 8, 6])._replace(parts={"a": torch.tensor([1.0, 0, 0]).double()})
    recipe = _recipe(name="gdpo", overlong_buffer=4, advantage={"whitened": False, "ddof": 0})
    a, b = torch.tensor([1.0, 0, 0]).double(), torch.tensor([-1.0, -0.5, 0]).double()
    expected = sum((part - part.mean()) / part.std(correction=0) for part in (a, b))
    torch.testing.assert_close(recipe.advantage(inputs).values, expected, rtol=1e-5, atol=1e-5)
    options = TypeAdapter(AlgorithmConfig).validate_python(
        {"name": "gdpo", "overlong_buffer": 4, "advantage": {"whitened": False, "ddof": 0}}
    )
    lighter = build_recipe(options, max_new_tokens=10, reward_weights={"overlong": 0.0})
    alone = (a - a.mean()) / a.std(correction=0)
    torch.testing.assert_close(lighter.advantage(inputs).values, alone, rtol=1e-5, atol=1e-5)


def test_what_counts_is_asked_of_what_the_advantage_looks_at() -> None:
    uniform = _rewards([1.0, 1.0], [0, 0], [1, 1])._replace(parts={"a": torch.tensor([1.0, 0.0]).double()})
    for name, drop, counted in (
        ("gdpo", True, True),
        ("gdpo", False, True),
        ("grpo", True, False),
        ("grpo", False, True),
    ):
        got = _recipe(name=name, drop_uniform_groups=drop).advantage(uniform).counted
        assert got.tolist() == [counted] * 2
    alike = uniform._replace(parts={"a": torch.ones(2).double()})
    for drop in (True, False):
        assert _recipe(name="gdpo", drop_uniform_groups=drop).advantage(alike).counted.tolist() == [not drop] * 2
    differing = {"a": torch.ones(2).double(), "b": torch.tensor([1.0, 0.0]).double()}
    options = TypeAdapter(AlgorithmConfig).validate_python({"name": "gdpo", "drop_uniform_groups": True})
    for weight, counted in ((0.0, False), (0.5, True)):  # a part without weight is not looked at
        recipe = build_recipe(options, max_new_tokens=10, reward_weights={"b": weight})
        assert recipe.advantage(uniform._replace(parts=differing)).counted.tolist() == [counted] * 2
    greedy = uniform._replace(greedy_rewards=torch.tensor([0.5, float("nan")]).double())
    assert _recipe(name="remax").advantage(greedy).counted.tolist() == [True, False]
    assert _recipe(name="grpo").advantage(greedy).counted.tolist() == [True, True]


@pytest.mark.parametrize(
    ("kl", "in_reward", "reference"),
    [
        ({"coefficient": 0.5, "where": "reward"}, True, True),
        ({"coefficient": 0.0, "where": "reward"}, False, False),
        ({"coefficient": 0.5, "where": "loss"}, False, True),
        ({"coefficient": 0.0, "where": "loss"}, False, False),
    ],
)
def test_a_reference_is_needed_where_a_kl_is_on(kl: dict[str, object], in_reward: bool, reference: bool) -> None:
    recipe = _recipe(name="dr_grpo", kl=kl)
    assert (recipe.kl_in_reward, recipe.uses_reference) == (in_reward, reference)


def test_a_recipe_of_one_term_is_as_plain_as_can_be() -> None:
    term = LossTerm("mine", lambda inputs: inputs.logprob, token_mean)
    recipe = Recipe("mine", (term,))
    assert (term.source, term.weight_at(7)) == (ExperienceSource.ROLLOUT, 1.0)
    assert not any((term.uses_advantage, term.only_positive, term.uses_reference, term.uses_entropy, term.is_kl))
    assert recipe.proximal == "rollout"
    assert not any((recipe.keep_groups_together, recipe.reset_optimizer, recipe.uses_reference, recipe.uses_entropy))


def _labelled(**changes: object) -> LossInputs:
    """Four completions, two of each prompt, whose tokens lie among each other; groups are numbered the other way."""
    sequence = torch.tensor([0, 1, 1, 2, 3, 3, 3, 0, 2])
    logprob = -torch.tensor([0.2, 0.9, 1.5, 2.0, 0.4, 0.3, 0.8, 0.6, 1.0], dtype=torch.float64)
    good = torch.tensor([1.0, 0.0, 1.0, 0.0])
    fields = {
        "logprob": logprob,
        "reference_logprob": logprob.flip(0),
        "sequence": sequence,
        "group": torch.tensor([1, 1, 0, 0])[sequence],
        "reward": good[sequence],
    }
    return _inputs(len(sequence))._replace(**fields | changes)  # type: ignore[arg-type]


def _of_completions(values: torch.Tensor, *, mean: bool) -> list[float]:
    sequence = _labelled().sequence.tolist()
    sums, counts = [0.0] * 4, [0] * 4
    for number, value in zip(sequence, values.tolist(), strict=True):
        sums[number] += value
        counts[number] += 1
    return [each / count if mean else each for each, count in zip(sums, counts, strict=True)]


def test_what_orpo_logs_is_of_the_pairs_means() -> None:
    recipe = _recipe(name="orpo", weight=0.5)
    assert isinstance(recipe, Recipe)
    assert recipe.keep_groups_together
    assert [term.name for term in recipe.terms] == ["sft", "orpo"]
    assert recipe.measures is not None
    found = recipe.measures(_labelled())
    means = _of_completions(_labelled().logprob, mean=True)
    odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
    chosen, rejected = [2, 0], [3, 1]  # by group
    expected = {
        "pairs/chosen": [means[i] for i in chosen],
        "pairs/rejected": [means[i] for i in rejected],
        "pairs/margin": [means[i] - means[j] for i, j in zip(chosen, rejected, strict=True)],
        "pairs/accuracy": [float(means[i] > means[j]) for i, j in zip(chosen, rejected, strict=True)],
        "pairs/log_odds": [odds[i] - odds[j] for i, j in zip(chosen, rejected, strict=True)],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(values, dtype=torch.float64))
    assert found["pairs/accuracy"].tolist() == [0.0, 1.0]
    same = recipe.measures(_labelled(logprob=torch.full((9,), -0.5, dtype=torch.float64)))
    assert same["pairs/accuracy"].tolist() == [0.5, 0.5]


def test_what_kto_logs_is_of_the_completions_sums() -> None:
    recipe = _recipe(name="kto", beta=0.2)
    assert isinstance(recipe, Recipe)
    assert [term.name for term in recipe.terms] == ["kto"]
    assert recipe.measures is not None
    inputs = _labelled()
    assert inputs.reference_logprob is not None
    ratios = _of_completions(inputs.logprob - inputs.reference_logprob, mean=False)
    baseline = torch.tensor(ratios[1], dtype=torch.float64)  # a tie: half right
    found = recipe.measures(inputs._replace(kl_baseline=baseline))
    right = [float(ratios[0] > ratios[1]), 0.5, float(ratios[2] > ratios[1]), float(ratios[3] < ratios[1])]
    assert found["labels/accuracy"].tolist() == right
    torch.testing.assert_close(found["labels/desirable"], torch.tensor([0.2 * ratios[0], 0.2 * ratios[2]]).double())
    torch.testing.assert_close(found["labels/undesirable"], torch.tensor([0.2 * ratios[1], 0.2 * ratios[3]]).double())
    assert found["labels/baseline"].tolist() == [baseline.item()] * 4
    [term], weighted = recipe.terms, inputs._replace(kl_baseline=baseline)
    gains = [0.2 * (ratio - ratios[1]) for ratio in ratios]
    losses = [1 / (1 + math.exp(gain if good else -gain)) for gain, good in zip(gains, (1, 0, 1, 0), strict=True)]
    expected = torch.tensor(losses, dtype=torch.float64)[inputs.sequence]  # each of its tokens, whatever its group
    torch.testing.assert_close(term.fn(weighted), expected)


def test_statistics_of_a_step_are_needed_by_masks_and_selections_alone() -> None:
    plain, masked, selected = _recipe(name="grpo"), _recipe(name="grpo", masks=["clip_b"]), _recipe(name="kl_cov")
    assert isinstance(plain, Recipe)
    assert isinstance(masked, Recipe)
    assert isinstance(selected, Recipe)
    assert [each.needs_step_statistics for each in (plain, masked, selected)] == [False, True, True]
    both = _recipe(name="grpo", masks=["clip_b", "clip_v"])
    assert isinstance(both, Recipe)
    assert [each.uses_expected_discriminant for each in (plain, masked, both)] == [False, False, True]
    assert (plain.entropy, plain.uses_kto_baseline, plain.uses_probabilities) == (0.0, False, False)


def test_an_adaptive_entropy_coefficient_needs_no_fixed_one() -> None:
    adaptive, neither = _recipe(name="skywork_or1", entropy=0.0), _recipe(name="grpo", entropy=0.0)
    assert isinstance(adaptive, Recipe)
    assert isinstance(neither, Recipe)
    assert [term.is_adaptive_entropy for term in adaptive.terms] == [False, True]
    assert len(neither.terms) == 1


@pytest.mark.parametrize("zero_tail", [False, True])
def test_the_optimal_token_baseline_of_a_recipe_counts_episodes_once(zero_tail: bool) -> None:
    """The first two experiences are one rollout; a token that only the third reaches has the zero baseline or none."""
    recipe = _recipe(name="otb", advantage={"name": "optimal_token_baseline", "zero_tail": zero_tail})
    assert isinstance(recipe, Recipe)
    assert recipe.token_advantage is not None
    sequence, p = torch.tensor([0, 1, 2, 2]), torch.tensor([0.5, 0.5, 0.6, 0.9]).double()
    inputs = _rewards([0.0, 0.0, 1.0], [0, 0, 0], [1, 1, 2])._replace(episodes=torch.tensor([0, 0, 1]))
    scores = TokenAdvantageInputs(logprob=p.log(), collision=p**2 + (1 - p) ** 2)
    found = recipe.token_advantage(inputs, sequence, scores)
    baseline = 0.32 / (0.5 + 0.32)  # the weights of the two rollouts are 2 (1 - p)^2
    expected = [-baseline, -baseline, 1 - baseline, float(zero_tail)]
    assert found.values.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_recipe_of_terms_alone_needs_nothing_else() -> None:
    bare = Recipe("mine", ())
    assert bare.entropy == 0.0
    unset = ("uses_kto_baseline", "reset_optimizer", "teacher_prompts", "keep_groups_together", "uses_probabilities")
    more = ("uses_expected_discriminant", "uses_reference", "needs_step_statistics")
    assert [name for name in (*unset, *more) if getattr(bare, name)] == []
    term = LossTerm("mine", lambda inputs: inputs.logprob, token_mean)
    assert (term.weight, term.uses_advantage, term.uses_reference) == (1.0, False, False)
