"""KL penalties in the reward, coefficients that adapt, and the policy that ratios are taken to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import (
    batch_for,
    distance,
    flat,
    gradient,
    options_of,
    padded_logprobs,
    record,
    trainer_of,
    watch_gradients,
)
from torch import Tensor

from rollmill.types import IMPORTED_FROM, Experience

PROXIMAL = ["rollout", "recompute", "interpolate"]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "grpo"])
@pytest.mark.parametrize("proximal", ["rollout", "recompute", "interpolate"])
def test_kl_in_the_reward_is_taken_off_before_advantages(toy: Any, make_batch: Any, name: str, proximal: str) -> None:
    """k1 is of the policy as the trainer sees it at the start of the step, whatever ratios are taken to."""
    kl = {"coefficient": 0.05, "estimator": "k1", "where": "reward"}
    model, reference, batch = toy("qwen3"), toy("qwen3", seed=5), make_batch()
    with torch.no_grad():
        pairs = zip(padded_logprobs(model, batch), padded_logprobs(reference, batch), strict=True)
        k1 = [(a - b).double().numpy() for a, b in pairs]
    options = options_of(name, kl=kl, proximal=proximal)
    trainer_of(model, options, reference=reference, updates_per_batch=2).step(batch, 0)
    shaped = np.array([e.reward - 0.05 * k.sum() for e, k in zip(batch, k1, strict=True)])
    assert np.ptp(shaped - [e.reward for e in batch]) > 0.1
    to_go = [e.reward - 0.05 * k[::-1].cumsum()[::-1] for e, k in zip(batch, k1, strict=True)]
    tokens = np.concatenate(to_go)
    for e, r, returns in zip(batch, shaped, to_go, strict=True):
        compared = np.array([s for s, o in zip(shaped, batch, strict=True) if o.group == e.group])
        expected = (r - compared.mean()) / (compared.std(ddof=1) + 1e-6)
        if name == "reinforce_plus_plus":
            expected = (returns - tokens.mean()) / tokens.std(ddof=1)
        np.testing.assert_allclose(e.advantage[e.action_mask], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", "gigpo"])
def test_kl_in_the_reward_of_a_rollout_is_that_of_all_its_experiences(toy: Any, make_batch: Any, name: str) -> None:
    """Each group is two rollouts, of which the first gave all experiences but the last."""
    kl = {"coefficient": 0.05, "estimator": "k1", "where": "reward"}
    model, reference, batch = toy("qwen3"), toy("qwen3", seed=5), make_batch()
    with torch.no_grad():
        pairs = zip(padded_logprobs(model, batch), padded_logprobs(reference, batch), strict=True)
        penalties = [0.05 * float((a - b).double().sum()) for a, b in pairs]
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(batch):
        groups.setdefault(each.group, []).append(number)
    advantage = {"name": "gigpo", "weight": 0, "scale": "none"} if name == "gigpo" else "mean_baseline"
    for own in groups.values():
        for number in own:
            batch[number].reward, batch[number].step_reward = 0.0, 0.0
            batch[number].episode = (batch[number].group, number == own[-1])
    trainer_of(model, options_of(name, kl=kl, advantage=advantage), reference=reference).step(batch, 0)
    for own in groups.values():
        first, last = sum(penalties[number] for number in own[:-1]), penalties[own[-1]]
        for number in own:
            expected = (last - first if number != own[-1] else first - last) / 2
            moved = batch[number].advantage[batch[number].action_mask]
            np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-5)


def test_equal_rewards_and_an_equal_reference_move_nothing(toy: Any, make_batch: Any) -> None:
    """Whatever the rollout engine's rounding is: the KL in the reward is between two models of the trainer."""
    kl = {"coefficient": 0.1, "estimator": "k1", "where": "reward"}
    batch = make_batch()
    for e in batch:
        e.reward = 0.0
    for name in ("reinforce_plus_plus", "grpo", "reinforce_plus_plus_baseline"):
        metrics = trainer_of(toy("qwen3"), options_of(name, kl=kl)).step(batch, 0)
        assert all((e.advantage == 0).all() for e in batch)
        assert metrics["skipped"] == 1


def test_kl_in_the_reward_stands_on_each_token_for_a_critic(toy: Any, make_batch: Any) -> None:
    """With gamma and lambda 0 an advantage is the token's reward minus its value."""
    options = options_of(
        "ppo",
        advantage={"gamma": 0.0, "lam": 0.0, "whiten": False},
        kl={"coefficient": 0.05, "estimator": "k1", "where": "reward"},
    )
    model, reference, batch = toy("qwen3"), toy("qwen3", seed=5), make_batch()
    trainer = trainer_of(model, options, reference=reference)
    with torch.no_grad():
        trainer._critic.model.head.weight.zero_()
        others = padded_logprobs(reference, batch)
        own = padded_logprobs(model, batch)
    trainer.step(batch, 1)
    for e, policy, other in zip(batch, own, others, strict=True):
        expected = -0.05 * (policy - other).numpy()
        expected[-1] += e.reward
        np.testing.assert_allclose(e.advantage[e.action_mask], expected, atol=1e-5)


@pytest.mark.parametrize(("target", "direction"), [(1e-3, 1), (1e3, -1)])
def test_adaptive_kl_follows_its_target_and_is_kept(toy: Any, make_batch: Any, target: float, direction: int) -> None:
    options = options_of("grpo", kl={"coefficient": 0.1, "target": target, "horizon": 100})
    trainer = trainer_of(toy("qwen3"), options, reference=toy("qwen3", seed=5))
    batch = make_batch()
    metrics = trainer.step(batch, 0)
    after = 0.1 * (1 + direction * 0.2 * len(batch) / 100)  # the relative error counts up to .2
    assert metrics["kl_coefficient"] == 0.1
    assert (metrics["kl_ref"] - target) * direction > 0
    assert trainer.coefficients.kl == pytest.approx(after)
    resumed = trainer_of(toy("qwen3"), options, reference=toy("qwen3", seed=5))
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.coefficients.kl == trainer.coefficients.kl
    metrics = trainer.step(batch, 1)
    assert metrics["kl_coefficient"] == pytest.approx(after)
    penalty = metrics["loss"] - metrics["loss/policy"]
    assert penalty == pytest.approx(after * metrics["loss/kl"], rel=1e-3)


def _old(proximal: str, recorded: Tensor, before: Tensor, now: Tensor, versions: Tensor, version: int) -> Tensor:
    if proximal == "rollout":
        return recorded
    if proximal == "recompute":
        return before
    d = version - versions
    return recorded + d / (d + 1) * (now - recorded)


def _loss(batch: list[Experience], own: list[Tensor], before: list[Tensor], proximal: str, version: int) -> Tensor:
    terms = []
    for e, now, then in zip(batch, own, before, strict=True):
        recorded, versions = (torch.from_numpy(x[e.action_mask]) for x in (e.logprobs, e.versions))
        log_ratio = now - _old(proximal, recorded, then, now.detach(), versions, version)
        advantage = torch.from_numpy(e.advantage[e.action_mask])
        terms.append(-torch.minimum(log_ratio.exp() * advantage, log_ratio.exp().clamp(0.8, 1.2) * advantage))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_ratios_are_taken_to_the_proximal_policy(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, proximal: str
) -> None:
    """Two passes over tokens made by four versions of the weights, the current one among them."""
    options = options_of("grpo", aggregation="token-mean", proximal=proximal)
    batch, version = make_batch(), 7
    record(toy("qwen3"), batch, 0.2)
    for e in batch:
        e.versions = np.where(e.action_mask, version - np.arange(len(e.versions)) % 4, -1).astype(np.int32)
    one, two = (trainer_of(toy("qwen3"), options, lr=3e-3, epochs_per_batch=epochs) for epochs in (1, 2))
    with torch.no_grad():
        before = padded_logprobs(one.model, batch)
    gradients = watch_gradients(monkeypatch)
    two.step(batch, version)
    first = gradient(_loss(batch, padded_logprobs(one.model, batch), before, proximal, version), one.model)
    assert distance(gradients["policy"][0], first) < 1e-5
    one.step(batch, version)
    if proximal == "interpolate":  # a single update starts from the policy itself
        return
    second = gradient(_loss(batch, padded_logprobs(one.model, batch), before, proximal, version), one.model)
    assert distance(gradients["policy"][1], second) < 1e-5
    assert torch.equal(gradients["policy"][2], gradients["policy"][0])
    assert not torch.equal(flat(one.model), flat(two.model))


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_one_update_of_fresh_tokens_has_ratio_one(toy: Any, make_batch: Any, proximal: str) -> None:
    options = options_of("gspo", proximal=proximal)
    metrics = trainer_of(toy("qwen3"), options).step(batch_for(make_batch, options), 0)
    assert metrics["ratio/mean"] == 1.0
    assert metrics["ratio/clip_fraction"] == 0.0


def test_tokens_of_another_run_keep_their_ratio_though_their_versions_match(toy: Any, make_batch: Any) -> None:
    """They were sampled with the other run's weights of that number."""
    trainer, batch = trainer_of(toy("qwen3"), options_of("grpo", proximal="rollout")), make_batch()
    record(trainer.model, batch, 0.0)
    for each in batch:
        each.logprobs = (each.logprobs - 0.5).astype(np.float32)
        each.info = {**each.info, IMPORTED_FROM: "other"}
    assert trainer.step(batch, int(batch[0].versions.max()))["ratio/mean"] == pytest.approx(np.exp(0.5), rel=1e-4)


@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_one_update_of_stale_tokens_has_ratio_one(toy: Any, make_batch: Any, proximal: str) -> None:
    options = options_of("grpo", proximal=proximal)
    assert trainer_of(toy("qwen3"), options).step(make_batch(), 5)["ratio/mean"] == 1.0


def test_the_reference_is_refreshed_every_n_steps(toy: Any, make_batch: Any) -> None:
    trainer = trainer_of(toy("qwen3"), options_of("grpo", kl={"coefficient": 0.1, "refresh_every": 2}), lr=1e-2)
    found = [trainer.step(make_batch(seed=n), n)["kl_ref"] for n in range(4)]
    assert [value == 0 for value in found] == [True, False, True, False]
