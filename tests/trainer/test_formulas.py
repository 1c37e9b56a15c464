"""The trainer's losses and gradients are those of the published formulas over plain transformers' log-probs.

Every batch is stale and is learned from twice, so that ratios matter; its completions are ragged, and a reward is
missing. Float64 models agree less closely than they could, because transformers computes norms in float32 and the
trainer keeps advantages and weights per token in float32.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.algorithm_batches import (
    distance,
    gradient,
    options_of,
    padded_distributions,
    padded_logprobs,
    plain_logprobs,
    plain_values,
    record,
    trainer_of,
    uneven_batch_for,
    watch_gradients,
)
from support.published_advantages import PARTS, Case, whitened
from support.published_formulas import FORMULAS
from torch import Tensor

from rollmill.config.algorithms import known_algorithms
from rollmill.types import Experience, ExperienceSource

BUILT_IN = set(known_algorithms())
LR = 3e-3


class _Start(NamedTuple):
    """The policy at the start of the step, over the whole batch."""

    logprobs: list[Tensor]
    distributions: list[Tensor]


def _case(batch: list[Experience], forward: Any, model: Any, start: _Start, reference: Any) -> Case:
    own = forward(model, batch)
    with torch.no_grad():
        others, distributions = forward(reference, batch), padded_distributions(model, batch)
    judged = [i for i, e in enumerate(batch) if e.reward is not None]
    experts = [own[i] for i, e in enumerate(batch) if e.source is ExperienceSource.EXPERT]
    own, before, others = ([rows[i] for i in judged] for rows in (own, start.logprobs, others))
    full, full_before = ([rows[i] for i in judged] for rows in (distributions, start.distributions))
    return Case([batch[i] for i in judged], own, before, others, experts, full, full_before)


def test_every_algorithm_has_a_formula() -> None:
    elsewhere = {"ppo", "kto", "distill", "jsd", "self_distill", "reward_model"}  # in this and other files
    assert {formula.name for formula in FORMULAS.values()} | elsewhere == BUILT_IN


@pytest.mark.parametrize(
    ("dtype", "forward", "bound"),
    [
        pytest.param(
            torch.float32, plain_logprobs, 1e-5, id="fp32 unpacked", marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
        pytest.param(torch.float64, padded_logprobs, 4e-6, id="float64 padded"),
    ],
)
@pytest.mark.parametrize("name", list(FORMULAS))
def test_loss_and_gradients_equal_the_formula_written_out(
    toy: Any,
    make_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    forward: Any,
    bound: float,
) -> None:
    formula = FORMULAS[name]
    options, model, reference = options_of(formula.name, **formula.keys), toy("qwen3").to(dtype), toy("qwen3", seed=5)
    batch, reference = uneven_batch_for(make_batch, options), reference.to(dtype)
    formula.prepare(batch)
    record(model, batch, formula.noise)
    config: dict[str, Any] = {"reference": reference, "reward_weights": PARTS, "lr": LR}
    twice = trainer_of(copy.deepcopy(model), options, epochs_per_batch=2, **config)
    once = trainer_of(model, options, **config)
    with torch.no_grad():
        start = _Start(forward(model, batch), padded_distributions(model, batch))
    losses, expected = [], []
    for _ in range(2):
        loss = formula.loss(_case(batch, forward, model, start, reference))
        losses.append(loss.item())
        expected.append(gradient(loss, model))
        if len(losses) == 1:
            assert once.step(batch, 1)["loss"] == pytest.approx(losses[0], rel=1e-5, abs=1e-6)
    gradients = watch_gradients(monkeypatch)
    assert twice.step(batch, 1)["loss"] == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-6)
    assert len(gradients["policy"]) == 2
    for got, want in zip(gradients["policy"], expected, strict=True):
        assert distance(got, want) < bound


def test_distill_by_default_takes_the_reverse_divergence_over_all_tokens(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL(policy || teacher) at temperature 1; the completion without a reward counts, too."""
    options, model, teacher = options_of("distill"), toy("qwen3"), toy("qwen3", seed=7)
    batch, terms = uneven_batch_for(make_batch, options), []
    for e in batch:
        ids, before = torch.from_numpy(e.token_ids).long()[None], np.flatnonzero(e.action_mask) - 1
        own, others = (torch.log_softmax(each(input_ids=ids).logits[0, before], -1) for each in (model, teacher))
        terms.append((own.exp() * (own - others.detach())).sum(-1))
    loss = torch.cat(terms).mean()
    expected, gradients = gradient(loss, model), watch_gradients(monkeypatch)
    metrics = trainer_of(model, options, teacher=teacher).step(batch, 1)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert distance(gradients["policy"][0], expected) < 1e-5


def _ppo_losses(trainer: Any, batch: list[Experience], old: Tensor, raw: Tensor, returns: Tensor) -> tuple[Any, Any]:
    """Of the policy and of the critic, over all action tokens of `batch`."""
    recorded = torch.cat([torch.from_numpy(e.logprobs[e.action_mask]) for e in batch])
    ratio = torch.exp(torch.cat(plain_logprobs(trainer.model, batch)) - recorded)
    a = whitened(raw)
    values = torch.cat(plain_values(trainer._critic.model, batch))
    near = torch.clamp(values, old - 0.2, old + 0.2)
    policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    return policy, 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()


def test_ppo_by_default_learns_from_the_reward_less_the_value(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gamma and both lambdas 1, A_t is r - V_t, and a return is r."""
    options = options_of("ppo", critic={"lr": 3e-2})
    batch = uneven_batch_for(make_batch, options)
    record(toy("qwen3"), batch, 0.1)
    judged = [e for e in batch if e.reward is not None]
    once, twice = (trainer_of(toy("qwen3"), options, epochs_per_batch=n, lr=LR) for n in (1, 2))
    with torch.no_grad():
        old = torch.cat(plain_values(once._critic.model, judged))
    returns = torch.tensor([e.reward for e in judged for _ in range(e.action_tokens)], dtype=torch.float64)
    expected = []
    for n in range(2):
        policy, critic = _ppo_losses(once, judged, old, returns - old.double(), returns)
        expected += [gradient(policy, once.model), gradient(critic, once._critic.model)]
        if n == 0:
            metrics = once.step(batch, 1)
            assert metrics["loss"] == pytest.approx(policy.item(), rel=1e-5, abs=1e-6)
            assert metrics["value/loss"] == pytest.approx(critic.item(), rel=1e-5)
    moved = (torch.cat(plain_values(once._critic.model, judged)) - old).abs()
    assert (moved > 0.2).float().mean() > 0.2
    gradients = watch_gradients(monkeypatch)
    twice.step(batch, 1)
    got = [gradients[name][n] for n in (0, 1) for name in ("policy", "critic")]
    assert max(distance(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5


def test_length_alpha_makes_lambda_follow_each_completions_length(toy: Any, make_batch: Any) -> None:
    """A_t = delta_t + gamma lambda A_{t+1}, lambda = 1 - 1 / (alpha l), not below 0; the critic keeps its own."""
    gamma, alpha = 0.97, 0.4
    options = options_of("ppo", advantage={"gamma": gamma, "length_alpha": alpha, "whiten": False})
    batch = uneven_batch_for(make_batch, options)
    trainer = trainer_of(toy("qwen3"), options)
    with torch.no_grad():
        values = [each.tolist() for each in plain_values(trainer._critic.model, batch)]
    metrics, lambdas, squares = trainer.step(batch, 1), set(), []
    for e, v in zip(batch, values, strict=True):
        lam = max(0.0, 1 - 1 / (alpha * e.action_tokens))
        if e.reward is None:
            assert not e.advantage.any()
            continue
        advantages, following = [], 0.0
        for t in reversed(range(len(v))):
            delta = gamma * v[t + 1] - v[t] if t + 1 < len(v) else e.reward - v[t]
            following = delta + gamma * lam * following
            advantages.append(following)
        np.testing.assert_allclose(e.advantage[e.action_mask], advantages[::-1], rtol=1e-4, atol=1e-5)
        squares += [(gamma ** (len(v) - 1 - t) * e.reward - v[t]) ** 2 for t in range(len(v))]
        lambdas.add(lam)
    assert metrics["value/loss"] == pytest.approx(np.mean(squares) / 2, rel=1e-4)
    assert len(lambdas) > 5


def test_kimi_forgets_the_optimizers_moments_each_step(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's first update is lr g / (|g| + eps), and after a reset every step's first update is one."""
    options = options_of("kimi")
    trainer = trainer_of(toy("qwen3"), options, lr=LR, eps=1e-6)
    gradients = watch_gradients(monkeypatch)
    for n in range(3):
        before = _matrices_first(trainer.model)
        batch = uneven_batch_for(make_batch, options)
        record(trainer.model, batch, 0.1, seed=n)
        trainer.step(batch, n + 1)
        g = gradients["policy"][n]
        g = g * min(1.0, 1.0 / float(g.norm()))
        change = _matrices_first(trainer.model) - before
        torch.testing.assert_close(change, -LR * g / (g.abs() + 1e-6), rtol=1e-3, atol=1e-6)


def _matrices_first(model: Any) -> Tensor:
    """All weights in the optimizer's order."""
    return torch.cat([p.detach().flatten() for p in sorted(model.parameters(), key=lambda p: p.ndim < 2)])
