"""PPO's critic: gradients of both models, value pretraining, resume."""

from __future__ import annotations

import copy
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

from rollmill.errors import TrainingError
from rollmill.types import Experience

GAMMA, LAM, CRITIC_LAM, CLIP = 0.97, 0.9, 0.95, 0.03
GAE = {"gamma": GAMMA, "lam": LAM, "critic_lam": CRITIC_LAM}


def _values(critic: Any, batch: list[Experience]) -> list[Tensor]:
    """V of the states before each action token, one sequence at a time."""
    found = []
    for e in batch:
        hidden = critic.network(input_ids=torch.from_numpy(e.token_ids).long()[None], use_cache=False).last_hidden_state
        found.append((hidden[0] @ critic.head.weight[0] + critic.head.bias)[np.flatnonzero(e.action_mask) - 1])
    return found


def _gae(values: list[float], reward: float, lam: float) -> list[float]:
    """A_t = delta_t + gamma lam A_{t+1}, from the last token to the first."""
    advantages, following, after = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + GAMMA * after - values[t]
        following, after = delta + GAMMA * lam * following, values[t]
        advantages.append(following)
    return advantages[::-1]


def _targets(critic: Any, batch: list[Experience]) -> tuple[Tensor, Tensor, Tensor]:
    """Old values, whitened advantages and returns of all action tokens, [A] each."""
    with torch.no_grad():
        old = [values.float().tolist() for values in _values(critic, batch)]
    raw = torch.tensor([a for e, v in zip(batch, old, strict=True) for a in _gae(v, e.reward, LAM)]).double()
    returns = [
        a + b for e, v in zip(batch, old, strict=True) for a, b in zip(_gae(v, e.reward, CRITIC_LAM), v, strict=True)
    ]
    whitened = (raw - raw.mean()) / (raw.std() + 1e-8)
    return torch.tensor([v for each in old for v in each]), whitened.float(), torch.tensor(returns)


def _policy_loss(model: Any, batch: list[Experience], advantage: Tensor) -> Tensor:
    recorded = torch.cat([torch.from_numpy(e.logprobs[e.action_mask]) for e in batch])
    ratio = torch.exp(torch.cat(padded_logprobs(model, batch)) - recorded)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def _value_loss(critic: Any, batch: list[Experience], old: Tensor, returns: Tensor) -> Tensor:
    values = torch.cat(_values(critic, batch))
    near = torch.clamp(values, old - CLIP, old + CLIP)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()


def test_gradients_of_policy_and_critic_equal_their_formulas(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes over a batch of stale tokens; an experience without a reward is as if absent."""
    options = options_of("ppo", advantage=GAE, critic={"lr": 1e-2, "value_clip": CLIP})
    batch = batch_for(make_batch, options)
    record(toy("qwen3"), batch, 0.1)
    batch[3].reward = None
    judged = [e for e in batch if e.reward is not None]
    one, two = (trainer_of(toy("qwen3"), options, epochs_per_batch=epochs) for epochs in (1, 2))
    old, advantage, returns = _targets(one._critic.model, judged)
    first = _policy_loss(one.model, judged, advantage), _value_loss(one._critic.model, judged, old, returns)
    expected = [gradient(first[0], one.model), gradient(first[1], one._critic.model)]
    metrics = one.step(batch, 1)
    assert metrics["loss"] == pytest.approx(first[0].item(), rel=1e-5, abs=1e-6)
    assert metrics["value/loss"] == pytest.approx(first[1].item(), rel=1e-5)
    moved = (torch.cat(_values(one._critic.model, judged)) - old).abs()
    assert (moved > CLIP).float().mean() > 0.2
    expected.append(gradient(_policy_loss(one.model, judged, advantage), one.model))
    expected.append(gradient(_value_loss(one._critic.model, judged, old, returns), one._critic.model))
    gradients = watch_gradients(monkeypatch)
    two.step(batch, 1)
    got = [gradients[name][n] for n in (0, 1) for name in ("policy", "critic")]
    assert max(distance(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5


def test_warm_up_moves_the_critic_alone(toy: Any, make_batch: Any) -> None:
    options = options_of("ppo", critic={"lr": 1e-2, "warmup_steps": 2})
    trainer = trainer_of(toy("qwen3"), options)
    before, errors = flat(trainer.model), []
    for n in range(2):
        critic = flat(trainer._critic.model)
        errors.append(trainer.step(make_batch(), n)["value/loss"])
        assert torch.equal(flat(trainer.model), before)
        assert not torch.equal(flat(trainer._critic.model), critic)
    assert not trainer._optimizer.state
    assert errors[1] < errors[0]
    trainer.step(make_batch(), 2)
    assert not torch.equal(flat(trainer.model), before)


def test_a_head_on_the_policy_learns_alone_and_keeps_no_copy(toy: Any, make_batch: Any) -> None:
    options = options_of("ppo", critic={"network": "policy", "lr": 3e-2, "warmup_steps": 12, "value_clip": None})
    trainer = trainer_of(toy("qwen3"), options)
    critic = trainer._critic.model
    assert {name for name, _ in critic.named_parameters()} == {"head.weight", "head.bias"}
    before = flat(trainer.model)
    errors = [trainer.step(make_batch(), n)["value/loss"] for n in range(12)]
    assert torch.equal(flat(trainer.model), before)
    assert errors[-1] < 0.8 * errors[0]
    trainer.step(make_batch(), 12)
    assert not torch.equal(flat(trainer.model), before)


@pytest.mark.parametrize("network", ["own", "policy"])
def test_critic_and_kl_resume_bit_for_bit(toy: Any, make_batch: Any, network: str) -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "where": "reward", "target": 1e-3, "horizon": 20}
    options = options_of("ppo", advantage=GAE, kl=kl, critic={"lr": 1e-3, "network": network})
    config: dict[str, Any] = {"updates_per_batch": 2, "epochs_per_batch": 2, "schedule": "cosine"}
    trainer = trainer_of(toy("qwen3"), options, **config)
    for n in range(2):
        trainer.step(make_batch(seed=n), n)
    saved = copy.deepcopy((trainer.model.state_dict(), trainer.state_dict()))
    resumed = trainer_of(toy("qwen3", seed=9), options, seed=123, **config)
    resumed.model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for n in (2, 3):
        assert resumed.step(make_batch(seed=n), n) == trainer.step(make_batch(seed=n), n)
    assert torch.equal(flat(resumed.model), flat(trainer.model))
    assert torch.equal(flat(resumed._critic.model), flat(trainer._critic.model))
    assert resumed.coefficients.kl == trainer.coefficients.kl != 0.1


def test_a_gradient_of_the_critic_that_is_not_finite_ends_the_step(toy: Any, make_batch: Any) -> None:
    trainer = trainer_of(toy("qwen3"), options_of("ppo"))
    batch = batch_for(make_batch, options_of("ppo"))
    batch[0].reward = 1e30  # its square is beyond float32
    before = flat(trainer._critic.model)
    with pytest.raises(TrainingError, match="the critic's gradient is not finite, in a micro-batch with tasks "):
        trainer.step(batch, 0)
    assert torch.equal(flat(trainer._critic.model), before)


def test_the_critic_says_the_same_twice_though_its_network_has_dropout(toy: Any, make_batch: Any) -> None:
    model = toy("qwen3", attention_dropout=0.5).train()
    trainer, batch = trainer_of(model, options_of("ppo", critic={"lr": 1e-30})), make_batch()
    first, second = (trainer.step(batch, 0)["value/loss"] for _ in range(2))
    assert first == second
    assert trainer._critic.model.training


def test_a_part_without_action_tokens_is_passed_over(toy: Any, make_batch: Any) -> None:
    batch = make_batch(groups=2)
    for e in batch:
        if e.group == "g0":
            e.action_mask = np.zeros_like(e.action_mask)
    metrics = trainer_of(toy("qwen3"), options_of("ppo"), updates_per_batch=2).step(batch, 0)
    assert np.isfinite(metrics["value/loss"])
