"""A name of a run file computes what it says, with the options of the file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from rollmill.algorithms import (
    AdvantageInputs,
    LossInputs,
    MaskInputs,
    advantages,
    build_recipe,
    corrections,
    entropy,
    kl,
    losses,
    trust_region,
)
from rollmill.algorithms import sequence_losses as sequences
from rollmill.algorithms import token_advantages as steps
from rollmill.algorithms.binding import (
    bind_clip_indicator,
    bind_loss,
)
from rollmill.algorithms.recipe import Recipe
from rollmill.config.algorithms import AlgorithmConfig, part_sections
from rollmill.config.algorithms.base import AdvantageSection, LossSection, MaskSection
from rollmill.config.algorithms.corrections import CorrectionSection
from rollmill.config.section import module_sections, section_from_signature
from rollmill.config.validation_errors import section_tag
from rollmill.errors import ConfigError

N = 8


def recipe_of(**options: Any) -> Recipe:
    validated = TypeAdapter(AlgorithmConfig).validate_python({"name": "grpo", **options})
    return build_recipe(validated, max_new_tokens=20)


@pytest.fixture
def tokens() -> LossInputs:
    """Two sequences of four tokens, far enough from the old policy that every bound matters to some."""
    random = torch.Generator().manual_seed(0)

    def numbers(scale: float) -> Tensor:
        return scale * torch.randn(N, generator=random, dtype=torch.float64)

    logprob, sequence = -1.5 + numbers(0.3), torch.tensor([0, 1] * 4)
    return LossInputs(
        logprob=logprob,
        old_logprob=logprob + numbers(0.4),
        rollout_logprob=logprob + numbers(0.6) + 0.6 * sequence,
        advantage=torch.tensor([0.8, -0.6], dtype=torch.float64)[sequence],
        reward=numbers(1.0),
        entropy=numbers(1.0).abs(),
        reference_logprob=logprob + numbers(0.2),
        staleness=torch.ones(N),
        sequence=sequence,
        group=torch.zeros(N, dtype=torch.long),
    )


LOSS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "ppo_clip": (losses.ppo_clip, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}),
    "gspo": (sequences.gspo, {"clip_low": 0.01, "clip_high": 0.02}),
    "gspo_token": (sequences.gspo_token, {"clip_low": 0.01, "clip_high": 0.02}),
    "gmpo": (sequences.gmpo, {"clip_low": 0.1, "clip_high": 0.2}),
    "surrogate": (losses.surrogate, {}),
    "cispo": (losses.cispo, {"clip_low": 0.2, "clip_high": 0.1}),
    "sapo": (losses.sapo, {"tau_positive": 1.5, "tau_negative": 2.5}),
    "topr": (sequences.topr, {}),
    "kimi_mirror": (sequences.kimi_mirror, {"tau": 0.3}),
    "sppo": (sequences.sppo, {"beta": 0.5}),
    "softmax_ppo": (losses.softmax_ppo, {"clip": 0.2}),
    "rec": (trust_region.rec, {"clip": "ring", "importance": True, "clip_low": 0.1, "far_high": 0.5}),
}
ON_ROLLOUT = {
    "dppo_tv": (trust_region.dppo_tv, {"bound_low": 0.01, "bound_high": 0.03, "kl": 0.1}),
    "vespo": (sequences.vespo, {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.5, "lambda_negative": 1.0}),
}
PLAIN = {
    "policy_gradient": (losses.policy_gradient, {}),
    "raft": (losses.raft, {}),
    "opmd": (losses.opmd, {"tau": 3.0}),
}

BY_SEQUENCE = {"gspo", "gspo_token", "gmpo", "vespo", "topr", "kimi_mirror", "sppo"}


def arguments_of(name: str, inputs: LossInputs) -> tuple[Tensor, ...]:
    if name in PLAIN:
        return inputs.logprob, inputs.advantage
    old = inputs.rollout_logprob if name in ON_ROLLOUT else inputs.old_logprob
    found = (inputs.logprob, old, inputs.advantage)
    return (*found, inputs.sequence) if name in BY_SEQUENCE else found


@pytest.fixture
def step(tokens: LossInputs) -> MaskInputs:
    """The same tokens as the whole of an optimizer step."""
    random = torch.Generator().manual_seed(2)
    return MaskInputs(
        logprob=tokens.logprob,
        old_logprob=tokens.old_logprob,
        rollout_logprob=tokens.rollout_logprob,
        advantage=tokens.advantage,
        entropy=tokens.entropy,
        dropped=torch.arange(N) == 1,
        draw=torch.rand(N, generator=random),
        sequence=tokens.sequence,
        expected_discriminant=torch.rand(N, generator=random, dtype=torch.float64),
    )


def test_every_name_is_looked_at_below() -> None:
    losses = {section_tag(each): each for each in part_sections(LossSection)}
    assert {*LOSS, *ON_ROLLOUT, *PLAIN, "kl_cov"} == set(losses)
    assert [name for name, each in losses.items() if each.selection] == ["kl_cov"]
    assert set(DROPS) == {name for name, each in losses.items() if each.clip_indicator}
    assert set(MASK) == {section_tag(each) for each in part_sections(MaskSection)}
    weights = module_sections("rollmill.config.algorithms.corrections", CorrectionSection)
    assert set(WEIGHTS) == {section_tag(each) for each in weights}
    advantages = [each for each in part_sections(AdvantageSection) if not (each.per_token or each.uses_critic)]
    assert set(COMPARES) == {section_tag(each) for each in advantages}


@pytest.mark.parametrize("name", [*LOSS, *ON_ROLLOUT, *PLAIN])
def test_a_loss(name: str, tokens: LossInputs) -> None:
    function, options = (LOSS | ON_ROLLOUT | PLAIN)[name]
    tokens = tokens._replace(advantage=tokens.reward)  # GSPO's two forms differ where advantages do
    [term] = recipe_of(loss={"name": name, **options}).terms
    assert torch.equal(term.fn(tokens), function(*arguments_of(name, tokens), **options))


DROPS: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.clipped,
    "gspo": sequences.gspo_clipped,
    "gspo_token": sequences.gspo_clipped,
    "gmpo": sequences.gmpo_clipped,
    "rec": trust_region.rec_clipped,
    "dppo_tv": trust_region.dppo_masked,
}


@pytest.mark.parametrize("name", [*LOSS, *ON_ROLLOUT, *PLAIN])
def test_the_tokens_that_a_loss_drops(name: str, tokens: LossInputs) -> None:
    options = (LOSS | ON_ROLLOUT | PLAIN)[name][1]
    dropped = recipe_of(loss={"name": name, **options}).dropped
    if name not in DROPS:
        assert dropped is None
        return
    own = {key: value for key, value in options.items() if key not in ("importance", "kl")}
    assert dropped is not None
    arguments = arguments_of(name, tokens)
    expected = DROPS[name](*(arguments[:3] if name == "gmpo" else arguments), **own)
    assert torch.equal(dropped(tokens), expected)
    assert expected.any()


def test_a_loss_that_selects_tokens_over_the_whole_step(tokens: LossInputs, step: MaskInputs) -> None:
    recipe = recipe_of(loss={"name": "kl_cov", "share": 0.3, "coefficient": 0.7})
    [term] = recipe.terms
    assert recipe.selection is not None
    selected = recipe.selection(step)
    assert torch.equal(selected, entropy.largest_covariance(step.logprob, step.advantage, share=0.3))
    assert int(selected.sum()) == 2
    expected = entropy.kl_cov(tokens.logprob, tokens.old_logprob, tokens.advantage, selected, coefficient=0.7)
    assert torch.equal(term.fn(tokens._replace(selected=selected)), expected)


MASK: dict[str, tuple[Callable[[MaskInputs], Tensor], dict[str, Any]]] = {
    "high_entropy": (lambda i: entropy.high_entropy(i.entropy, top=0.5), {"top": 0.5}),
    "clip_b": (lambda i: entropy.clip_b(i.logprob, i.entropy, i.advantage, mu=0.1), {"mu": 0.1}),
    "clip_v": (
        lambda i: entropy.clip_v(
            i.logprob, i.entropy, cast(Tensor, i.expected_discriminant), i.advantage, mu=0.1, max_share=0.3
        ),
        {"mu": 0.1, "max_share": 0.3},
    ),
    "clip_cov": (
        lambda i: entropy.clip_cov(i.logprob, i.advantage, i.dropped, i.draw, share=0.3, low=0.01, high=9.0),
        {"share": 0.3, "low": 0.01, "high": 9.0},
    ),
    "second_moment": (
        lambda i: trust_region.second_moment(i.logprob, i.old_logprob, i.advantage, threshold=0.01),
        {"threshold": 0.01},
    ),
}


@pytest.mark.parametrize("name", list(MASK))
def test_a_mask(name: str, step: MaskInputs) -> None:
    keeps, options = MASK[name]
    [mask] = recipe_of(masks=[{"name": name, **options}]).masks
    kept = mask(step)
    assert torch.equal(kept, keeps(step))
    assert 0 < int(kept.sum()) < N


def test_a_users_loss_of_the_name_of_another_drops_no_tokens(tokens: LossInputs) -> None:
    def ppo_clip(logprob: Tensor, advantage: Tensor, *, half: float = 0.5) -> Tensor:
        return half * logprob * advantage

    part = section_from_signature(ppo_clip, LossSection)()
    assert bind_clip_indicator(part) is None
    assert torch.equal(bind_loss(part)(tokens), 0.5 * tokens.logprob * tokens.advantage)


def test_a_parameter_that_stands_for_nothing_is_an_error_wherever_it_stands() -> None:
    def first(mystery: Tensor, logprob: Tensor) -> Tensor:
        return mystery * logprob

    def last(logprob: Tensor, mystery: Tensor) -> Tensor:
        return mystery * logprob

    for function in (first, last):
        with pytest.raises(ConfigError, match=f"{function.__name__}: the parameter `mystery` stands for nothing"):
            bind_loss(section_from_signature(function, LossSection)())


WEIGHTS: dict[str, tuple[Callable[[LossInputs], Tensor], dict[str, Any]]] = {
    "tis": (lambda i: corrections.truncated_importance(i.old_logprob, i.rollout_logprob, 1.1), {"cap": 1.1}),
    "sequence_tis": (
        lambda i: corrections.sequence_truncated_importance(i.old_logprob, i.rollout_logprob, i.sequence, 1.3),
        {"cap": 1.3},
    ),
    "mis": (
        lambda i: corrections.masked_importance(i.old_logprob, i.rollout_logprob, low=0.9, high=1.5),
        {"low": 0.9, "high": 1.5},
    ),
    "sequence_mis": (
        lambda i: corrections.sequence_masked_importance(
            i.old_logprob, i.rollout_logprob, i.sequence, low=1e-9, high=1e9
        ),
        {"low": 1e-9, "high": 1e9},
    ),
    "geometric": (
        lambda i: corrections.geometric_rejection(i.old_logprob, i.rollout_logprob, i.sequence, low=0.7, high=1.5),
        {"low": 0.7, "high": 1.5},
    ),
    "k3": (
        lambda i: corrections.k3_rejection(i.old_logprob, i.rollout_logprob, i.sequence, bound=0.15),
        {"bound": 0.15},
    ),
    "decoupled": (
        lambda i: corrections.decoupled_importance(i.old_logprob, i.rollout_logprob, cap=1.2, beyond="cap"),
        {"cap": 1.2, "beyond": "cap"},
    ),
    "off_policy_mask": (
        lambda i: corrections.off_policy_sequence_mask(
            i.logprob, i.rollout_logprob, i.advantage, i.sequence, delta=0.2
        ),
        {"delta": 0.2},
    ),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_correction(name: str, tokens: LossInputs) -> None:
    weight, options = WEIGHTS[name]
    loss = {"name": "policy_gradient"}
    [plain], [term] = recipe_of(loss=loss).terms, recipe_of(loss=loss, corrections=[{"name": name, **options}]).terms
    torch.testing.assert_close(term.fn(tokens), plain.fn(tokens) * weight(tokens).double())
    assert not torch.equal(term.fn(tokens), plain.fn(tokens))


@pytest.fixture
def rewards() -> AdvantageInputs:
    """Two groups of four, in which everything that an advantage may look at differs."""
    random = torch.Generator().manual_seed(1)

    def numbers() -> Tensor:
        return torch.rand(N, generator=random, dtype=torch.float64)

    per_episode = numbers()[torch.arange(N) // 2 * 2]
    return AdvantageInputs(
        rewards=per_episode,
        groups=torch.arange(N) // 4,
        lengths=torch.arange(1, N + 1),
        episodes=torch.arange(N) // 2,
        anchors=torch.arange(N) % 2 + torch.arange(N) // 4 * 2,
        greedy_rewards=numbers(),
        step_rewards=numbers(),
        parts={"a": numbers(), "b": numbers()},
    )


def alone(inputs: AdvantageInputs) -> AdvantageInputs:
    """Every experience a rollout of its own."""
    return inputs._replace(episodes=torch.arange(N))


COMPARES: dict[str, tuple[Callable[[AdvantageInputs], Tensor], dict[str, Any]]] = {
    "grpo": (lambda i: advantages.grpo(i.rewards, i.groups, scale="batch", ddof=0), {"scale": "batch", "ddof": 0}),
    "mean_baseline": (lambda i: advantages.mean_baseline(i.rewards, i.groups), {}),
    "rloo": (lambda i: advantages.rloo(i.rewards, i.groups), {}),
    "reinforce": (lambda i: advantages.reinforce(i.rewards, i.groups), {}),
    "opo": (lambda i: advantages.opo(i.rewards, i.groups, i.lengths), {}),
    "pass_at_k": (lambda i: advantages.pass_at_k(i.rewards, i.groups, k=3), {"k": 3}),
    "best_of_group": (
        lambda i: advantages.best_of_group(i.rewards, i.groups, accept="all", threshold=0.2),
        {"accept": "all", "threshold": 0.2},
    ),
    "remax": (lambda i: advantages.remax(i.rewards, i.greedy_rewards), {}),
    "opmd": (
        lambda i: advantages.opmd(i.rewards, i.groups, baseline="logavgexp", tau=0.5),
        {"baseline": "logavgexp", "tau": 0.5},
    ),
    "asymre": (
        lambda i: advantages.asymre(i.rewards, i.groups, beta=0.3, keep_uniform=True),
        {"beta": 0.3, "keep_uniform": True},
    ),
    "gdpo": (
        lambda i: advantages.gdpo(torch.stack([i.parts["a"], i.parts["b"]], 1), i.groups, ddof=0),
        {"ddof": 0},
    ),
    "stepwise": (lambda i: steps.stepwise(i.rewards, i.groups, i.episodes, per_step=True), {"per_step": True}),
    "gigpo": (
        lambda i: steps.gigpo(i.step_rewards, i.groups, i.episodes, i.anchors, weight=0.3, gamma=0.5, scale="none"),
        {"weight": 0.3, "gamma": 0.5, "scale": "none"},
    ),
}


@pytest.mark.parametrize("name", list(COMPARES))
def test_an_advantage(name: str, rewards: AdvantageInputs) -> None:
    expected, options = COMPARES[name]
    inputs = rewards if name in ("stepwise", "gigpo") else alone(rewards)
    compare = recipe_of(advantage={"name": name, **options}).advantage
    assert compare is not None
    torch.testing.assert_close(compare(inputs).values, expected(inputs))


GIVEN: dict[str, Tensor] = {
    "logprob": torch.tensor([-0.5, -1.0, -2.0]),
    "old_logprob": torch.tensor([-0.6, -0.9, -2.0]),
    "rollout_logprob": torch.tensor([-0.7, -0.8, -2.0]),
    "teacher_logprob": torch.tensor([-1.0, -0.3, -2.5]),
    "collision": torch.tensor([0.5, 0.4, 0.3]),
    "entropy": torch.tensor([0.7, 0.9, 2.0]),
    "expected_discriminant": torch.tensor([0.1, 0.5, 0.2]),
    "dropped": torch.tensor([False, True, False]),
    "selected": torch.tensor([False, True, False]),
    "draw": torch.tensor([0.3, 0.1, 0.2]),
    "advantage": torch.tensor([1.0, -1.0, -0.5]),
    "sequence": torch.arange(3),
    "rewards": torch.tensor([1.0, 0.0, 0.25]),
    "rewards_S": torch.tensor([1.0, 0.0, 0.25]),
    "groups": torch.zeros(3, dtype=torch.long),
    "groups_S": torch.zeros(3, dtype=torch.long),
}


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),  # arXiv:1707.06347
        (losses.cispo, {"clip_low": 1.0, "clip_high": 4.0}),  # arXiv:2510.13786
        (losses.sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),  # arXiv:2511.20347
        (losses.chord_sft, {"cutoff": 1.0}),  # arXiv:2508.11408: none
        (sequences.gspo, {"clip_low": 3e-4, "clip_high": 4e-4}),  # arXiv:2507.18071
        (sequences.gmpo, {"clip_low": 0.4, "clip_high": 0.4}),  # arXiv:2507.20673
        (
            sequences.vespo,  # the code of arXiv:2602.10693
            {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        ),
        (trust_region.second_moment, {"threshold": 0.04}),  # arXiv:2510.01161
        (entropy.high_entropy, {"top": 0.2}),  # arXiv:2506.01939
        (entropy.clip_b, {"mu": 2.5}),  # Trinity-RFT
        (entropy.clip_v, {"mu": 8.5, "max_share": 1e-4}),  # Trinity-RFT
        (entropy.clip_cov, {"share": 2e-4, "low": 1.0, "high": 5.0}),  # verl
        (entropy.largest_covariance, {"share": 2e-4}),  # verl
        (entropy.kl_cov, {"coefficient": 1.0}),  # verl
        (kl.jsd_advantage, {"beta": 0.5}),  # TRL
        (advantages.pass_at_k, {"k": 4, "baseline": "mean", "scale": "subsets", "eps": 1e-6}),  # arXiv:2508.10751
        (steps.optimal_token_baseline, {"penalty": None, "episodes_S": None, "zero_tail": False, "eps": 1e-8}),  # verl
    ],
)
def test_options_that_a_file_leaves_out_are_as_published(
    function: Callable[..., Tensor], defaults: dict[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults
    given = {p.name: GIVEN[p.name] for p in parameters if p.default is p.empty}
    assert torch.equal(function(**given), function(**given, **defaults))
