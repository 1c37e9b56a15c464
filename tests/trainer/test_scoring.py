"""Reward-model training: the loss and its gradient, micro-batches, resume, what cannot go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.algorithm_batches import batch_for, distance, flat, gradient, options_of, trainer_of, watch_gradients
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollmill.errors import TrainingError
from rollmill.types import Experience

OPTIONS = options_of("reward_model", margin=0.3, centre_coefficient=0.05)
PLAIN = options_of("reward_model")


def _score(model: Any, experience: Experience) -> Tensor:
    """Of one sequence alone: w . h at its last token."""
    ids = torch.from_numpy(experience.token_ids).long()[None]
    hidden_Td = model.network(input_ids=ids, use_cache=False).last_hidden_state[0]
    score: Tensor = model.head.weight[0] @ hidden_Td[-1]
    return score


def _formula(model: Any, batch: list[Experience]) -> tuple[Tensor, dict[str, float]]:
    """The loss, pair by pair, and what the metrics should say."""
    groups = {e.group: [other for other in batch if other.group == e.group] for e in batch}
    pairs = [sorted(group, key=lambda e: -(e.reward or 0)) for group in groups.values()]
    chosen, rejected = (torch.stack([_score(model, pair[side]) for pair in pairs]) for side in (0, 1))
    losses = -logsigmoid(chosen - rejected - 0.3) + 0.05 * (chosen + rejected) ** 2
    margin = (chosen - rejected).detach()
    seen = {"accuracy": (margin > 0).double(), "margin": margin, "chosen": chosen, "rejected": rejected}
    return losses.mean(), {f"pairs/{name}": values.mean().item() for name, values in seen.items()}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma", "gemma2"])
def test_the_gradient_is_that_of_the_formula(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    trainer, batch = trainer_of(toy(architecture), OPTIONS), batch_for(make_batch, OPTIONS)
    loss, expected = _formula(trainer.model, batch)
    wanted = gradient(loss, trainer.model)
    gradients = watch_gradients(monkeypatch)
    metrics = trainer.step(batch, 0)
    assert distance(gradients["score"][0], wanted) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < metrics["pairs/accuracy"] < 1
    assert metrics["tokens"] == sum(e.action_tokens for e in batch)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "float64"])
def test_the_gradient_does_not_depend_on_rows(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bound: float
) -> None:
    batch, gradients, metrics = batch_for(make_batch, OPTIONS), watch_gradients(monkeypatch), []
    for budget in (1, 37, 60, 8192):
        trainer = trainer_of(toy("qwen3").to(dtype), OPTIONS, micro_batch_tokens=budget)
        metrics.append(trainer.step(batch, 0))
    assert all(distance(each, gradients["score"][0]) < bound for each in gradients["score"][1:])
    assert all(each == pytest.approx(metrics[0], rel=bound, abs=bound) for each in metrics)


def test_activations_that_are_recomputed_change_nothing(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, gradients = batch_for(make_batch, OPTIONS), watch_gradients(monkeypatch)
    for wanted in (False, True):
        trainer = trainer_of(toy("qwen3"), OPTIONS, gradient_checkpointing=wanted)
        assert trainer.model.network.is_activation_checkpointing == wanted
        trainer.step(batch, 0)
    assert distance(*gradients["score"]) < 1e-6


def test_a_new_scoring_model_says_0_and_the_policy_stays(toy: Any, make_batch: Any) -> None:
    policy = toy("qwen3")
    before = flat(policy)
    trainer = trainer_of(policy, PLAIN, epochs_per_batch=2, updates_per_batch=2, lr=1e-2)
    torch.nn.init.zeros_(trainer.model.head.weight)
    metrics = trainer.step(batch_for(make_batch, PLAIN), 0)
    assert metrics["updates"] == 4
    assert 0 < metrics["pairs/accuracy"] < 1
    for n in range(8):
        metrics = trainer.step(batch_for(make_batch, PLAIN), n)
    assert metrics["pairs/accuracy"] == 1.0
    assert torch.equal(flat(policy), before)


def test_equal_scores_count_half(toy: Any, make_batch: Any) -> None:
    trainer = trainer_of(toy("qwen3"), PLAIN)
    torch.nn.init.zeros_(trainer.model.head.weight)
    metrics = trainer.step(batch_for(make_batch, PLAIN), 0)
    assert (metrics["pairs/accuracy"], metrics["pairs/margin"]) == (0.5, 0.0)
    assert metrics["loss"] == pytest.approx(0.6931472, rel=1e-6)


def test_resume_is_bit_for_bit(toy: Any, make_batch: Any) -> None:
    config: dict[str, Any] = {"updates_per_batch": 2, "epochs_per_batch": 2, "schedule": "cosine"}
    batches = [batch_for(make_batch, OPTIONS, seed) for seed in range(4)]
    trainer = trainer_of(toy("qwen3"), OPTIONS, **config)
    for batch in batches[:2]:
        trainer.step(batch, 0)
    saved = copy.deepcopy(trainer.state_dict())
    resumed = trainer_of(toy("qwen3", seed=9), OPTIONS, seed=123, **config)
    resumed.load_state_dict(saved)
    for batch in batches[2:]:
        assert resumed.step(batch, 0) == trainer.step(batch, 0)
    assert torch.equal(flat(resumed.model), flat(trainer.model))


@pytest.mark.parametrize(("weight", "what"), [(1e30, "the loss of pairs is (inf|nan)"), (1e15, "the gradient is not")])
def test_what_is_not_finite_ends_the_step(toy: Any, make_batch: Any, weight: float, what: str) -> None:
    trainer = trainer_of(toy("qwen3"), options_of("reward_model", centre_coefficient=1.0))
    torch.nn.init.constant_(trainer.model.head.weight, weight)
    before = flat(trainer.model)
    with pytest.raises(TrainingError, match=f"training step 0: {what}.*in a micro-batch with tasks task-g"):
        trainer.step(batch_for(make_batch, PLAIN), 0)
    assert torch.equal(flat(trainer.model), before)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_bf16_is_near_fp32(toy: Any, make_batch: Any) -> None:
    found = [
        trainer_of(toy("qwen3"), OPTIONS, precision=precision).step(batch_for(make_batch, OPTIONS), 0)
        for precision in ("fp32", "bf16")
    ]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.02)
    assert found[1]["loss"] != found[0]["loss"]
