"""Every algorithm through the trainer: it steps, and its gradient does not depend on how the batch is cut."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import batch_for, distance, flat, options_of, record, trainer_of, watch_gradients
from torch import Tensor

from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.trainer import logprobs as passes_module
from rollmill.trainer.batch import build_micro_batches
from rollmill.trainer.update import PolicyUpdater
from rollmill.types import ExperienceSource

BUILT_IN = [name for name, section in known_algorithms().items() if section.trains_policy]
KEYS: dict[str, Any] = {"pass_at_k": {"advantage": {"k": 2}}}  #: the groups here are as large as its default k
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    return watch_gradients(monkeypatch)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_algorithm_makes_a_finite_step(toy: Any, make_batch: Any, name: str) -> None:
    options, model = options_of(name, **KEYS.get(name, {})), toy("qwen3")
    batch, before = batch_for(make_batch, options), flat(model)
    trainer = trainer_of(model, options, reference=toy("qwen3", seed=5))
    metrics = trainer.step(batch, 0)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    terms = [term for term in trainer.recipe.terms if not term.is_adaptive_entropy]
    assert {f"loss/{term.name}" for term in terms} <= metrics.keys()
    assert metrics["updates"] == 1
    assert metrics["grad_norm"] > 0
    assert metrics["entropy"] > 0
    assert metrics["tokens"] == sum(e.action_tokens for e in batch)
    assert not torch.equal(flat(model), before)
    assert all(np.isfinite(e.advantage).all() for e in batch)


def _follows_the_advantage(options: Any) -> bool:
    if not isinstance(options, PolicyGradientOptions) or options.advantage.uses_critic:
        return False
    fixed = options.loss.only_positive or getattr(options.advantage, "baseline", "") == "none"
    return options.loss.follows_advantage and not fixed


@pytest.mark.parametrize("name", [name for name in BUILT_IN if _follows_the_advantage(options_of(name))])
def test_equal_rewards_move_nothing_where_the_loss_follows_the_advantage(toy: Any, make_batch: Any, name: str) -> None:
    options = options_of(name, kl=0.0, **KEYS.get(name, {}))
    trainer = trainer_of(toy("qwen3"), options)
    moving, uniform = (
        [e for e in batch_for(make_batch, options, seed) if e.source is ExperienceSource.ROLLOUT] for seed in (0, 1)
    )
    assert trainer.step(moving, 0)["updates"] == 1
    for e in uniform:
        e.reward, e.reward_parts, e.greedy_reward = 0.1, {"exact": 0.1, "format": 0.3}, 0.1
    before = flat(trainer.model)
    metrics = trainer.step(uniform, 1)
    assert torch.equal(flat(trainer.model), before)
    assert metrics["skipped"] == 1
    assert all((e.advantage == 0).all() for e in uniform)


QUICK = {"grpo", "gspo", "mix", "ppo", "dpo", "kto", "jsd"}  # one of each kind; the others are run by `make test-slow`
CUT = {
    "grpo": {"aggregation": "token-mean"},
    "dr_grpo": {},
    "gspo": {},
    "mix": {"mu": 0.3, "kl": 0.1},
    "ppo": {"advantage": {"lam": 0.9}},
    "dpo": {"sft": 0.2},
    "orpo": {"weight": 0.5},
    "kto": {"desirable_weight": 1.3},
    "sft_is": {},
    "sft_phi": {"cutoff": 0.9},
    "jsd": {"beta": 0.3},
    "self_distill": {},
    "rloo": {},
    "raft": {},
    "gmpo": {},
    "opo": {},
    "otb": {},
    "vespo": {},
    "clip_cov": {"masks": [{"name": "clip_cov", "share": 0.1, "low": 0.0, "high": 3.0}]},
    "kl_cov": {"loss": {"share": 0.1}},
    "clip_b": {"masks": [{"name": "clip_b", "mu": 0.3}]},
    "clip_v": {"masks": [{"name": "clip_v", "mu": 0.3, "max_share": 0.05}]},
    "high_entropy": {},
    "skywork_or1": {"entropy": 0.01},
    "pass_at_k": KEYS["pass_at_k"],
    "lite_ppo": {},
    "m2po": {},
}


def _cut_every_way(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> list[dict[str, float]]:
    """Metrics of a first step from the same state: rows of 1 token, of some, of all; prefixes shared or not."""
    options, model = options_of(name, **CUT[name]), toy("qwen3").to(dtype)
    batch = batch_for(make_batch, options)
    record(model, batch, 3e-4 if name == "gspo" else 0.2)
    found = []
    for share in (True, False):
        monkeypatch.setattr(passes_module, "build_micro_batches", partial(build_micro_batches, share_prefixes=share))
        for budget in (1, 45, 100_000):
            reference = toy("qwen3", seed=5).to(dtype)
            trainer = trainer_of(copy.deepcopy(model), options, reference=reference, micro_batch_tokens=budget)
            found.append(trainer.step(batch, 1))
    return found


def _assert_equal(metrics: list[dict[str, float]], gradients: dict[str, list[Tensor]], bound: float) -> None:
    for each in metrics:
        assert each == pytest.approx(metrics[-1], rel=10 * bound, abs=bound)
    for seen in gradients.values():
        assert all(distance(each, seen[-1]) < bound for each in seen)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(torch.float64, id="float64"),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CUT])
def test_loss_and_gradient_do_not_depend_on_rows(
    toy: Any,
    make_batch: Any,
    gradients: dict[str, list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
) -> None:
    metrics = _cut_every_way(toy, make_batch, monkeypatch, name, dtype)
    assert len(gradients["policy"]) == 6
    assert len(gradients["critic"]) == (6 if name == "ppo" else 0)
    _assert_equal(metrics, gradients, BOUNDS[dtype])


@pytest.mark.parametrize("name", ["grpo", "gspo", "dpo", "kto", "self_distill"])
def test_a_denominator_per_row_would_be_noticed(
    toy: Any, make_batch: Any, gradients: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Negative control: with the usual mistake the check above fails."""
    original = PolicyUpdater.forward

    def wrong(self: PolicyUpdater, batch: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        share = len(micro.tokens) / len(batch.table.target)
        loss, terms = original(self, batch, micro, *args, **kwargs)
        return loss / share, terms

    monkeypatch.setattr(PolicyUpdater, "forward", wrong)
    _cut_every_way(toy, make_batch, monkeypatch, name, torch.float32)
    with pytest.raises(AssertionError):
        _assert_equal([], gradients, 1e-2)


def test_chord_follows_its_schedule(toy: Any, make_batch: Any) -> None:
    options = options_of("chord", warmup=2, decay=4, peak=0.8, valley=0.2)
    trainer = trainer_of(toy("qwen3"), options)
    steps = [trainer.step(batch_for(make_batch, options, seed), seed) for seed in range(8)]
    falling = [0.2 + 0.6 * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]
    assert [each["weight/sft"] for each in steps] == pytest.approx([0.0, 0.4, *falling, 0.2, 0.2])
    for each in steps:
        assert each["weight/policy"] == pytest.approx(1 - each["weight/sft"])
        sft = each["weight/sft"] * each.get("loss/sft", 0.0)  # not computed at weight 0
        assert each["loss"] == pytest.approx(each["weight/policy"] * each["loss/policy"] + sft, abs=1e-6)


@pytest.mark.parametrize("reset", [True, False])
def test_reset_optimizer_forgets_the_moments(toy: Any, make_batch: Any, reset: bool) -> None:
    options = options_of("grpo", reset_optimizer=reset)
    trainer = trainer_of(toy("qwen3"), options)
    trainer.step(make_batch(), 0)
    new = trainer_of(copy.deepcopy(trainer.model), options)
    for each in (trainer, new):
        each.step(make_batch(seed=1), 1)
    assert torch.equal(flat(trainer.model), flat(new.model)) == reset
