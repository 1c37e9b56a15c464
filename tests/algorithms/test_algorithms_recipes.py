"""Recipes: what each algorithm's options turn into."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from rollmill.algorithms import LossTerm, Recipe, RewardInputs, TermInputs, TokenScores, build_recipe, token_mean
from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.core import Source
from rollmill.recipes import AlgorithmConfig, known_algorithms


def _recipe(**options: object) -> object:
    return build_recipe(TypeAdapter(AlgorithmConfig).validate_python(options), max_new_tokens=10)


def _inputs(n: int) -> TermInputs:
    zeros = torch.zeros(n)
    return TermInputs(
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


def _rewards(rewards: list[float], groups: list[int], lengths: list[int]) -> RewardInputs:
    values, n = torch.tensor(rewards).double(), len(rewards)
    return RewardInputs(
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
    assert recipe.terms[0].source is Source.USUAL
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
    assert terms["sft"].source is Source.EXPERT
    assert terms["policy"].source is Source.USUAL


def test_sft_needs_no_rewards() -> None:
    recipe = _recipe(name="sft", aggregation="sequence-mean")
    assert recipe.advantage is None
    assert recipe.terms[0].fn(_inputs(1)).tolist() == [1]
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
    got = recipe.token_advantage(forked, torch.arange(4), TokenScores()).values
    centred = torch.tensor([0.5, 0.5, 0.5, -0.5]).double()
    torch.testing.assert_close(got, (centred - centred.mean()) / centred.std())


def test_unjudged_experiences_are_not_counted() -> None:
    inputs = _rewards([1.0, float("nan"), 0.0], [0, 0, 0], [8, 10, 3])
    for name in set(ROLLING) - {"ppo"}:
        recipe = _recipe(name=name)
        if recipe.advantage is None:
            half = torch.full((3,), 0.5)
            scores = TokenScores(logprob=half.log(), collision=half)
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
    assert (term.source, term.weight_at(7)) == (Source.USUAL, 1.0)
    assert not any((term.uses_advantage, term.only_positive, term.uses_reference, term.uses_entropy, term.is_kl))
    assert recipe.proximal == "rollout"
    assert not any((recipe.keeps_groups, recipe.reset_optimizer, recipe.uses_reference, recipe.uses_entropy))


def test_every_name_of_a_run_file_is_a_function_of_the_package() -> None:
    import rollmill.algorithms as package
    from rollmill.algorithms.binding import ADVANTAGES, LOSSES

    names = {*ADVANTAGES, *LOSSES, "gae", "reinforce_plus_plus"}
    assert {name for name in names if not callable(getattr(package, name, None))} == set()
