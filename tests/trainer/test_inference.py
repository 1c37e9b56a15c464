"""What needs no rewards may be computed before they are there: the step is the same to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_batches import flat, options_of, trainer_of

from rollmill.trainer import Trainer

KL = {"coefficient": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing to compute": ("grpo", {}, {}),
    "reference": ("grpo", {"kl": KL}, {}),
    "refreshed reference": ("grpo", {"kl": KL | {"refresh_every": 1}}, {}),
    "old log-probs": ("grpo", {"proximal": "recompute"}, {"updates_per_batch": 2}),
    "critic": ("ppo", {}, {"epochs_per_batch": 2}),
}


def judged_late(trainer: Trainer, make_batch: Any, step: int) -> tuple[int, dict[str, float]]:
    """A step whose rewards come after the passes; the number of passes."""
    batch = make_batch(seed=step, version=step)
    rewards = [each.reward for each in batch]
    for each in batch:
        each.reward = None
    passes = sum(1 for _ in trainer.precompute(batch, step))
    for each, reward in zip(batch, rewards, strict=True):
        each.reward = reward
    return passes, trainer.step(batch, step)


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_on_passes_made_ahead_is_the_same(toy: Any, make_batch: Any, case: str) -> None:
    name, options, config = CASES[case]
    at_once, ahead = (trainer_of(toy("qwen3"), options_of(name, **options), lr=1e-2, **config) for _ in range(2))
    for step in range(3):
        expected = at_once.step(make_batch(seed=step, version=step), step)
        passes, found = judged_late(ahead, make_batch, step)
        assert found == expected
        assert (passes > 0) is (case != "nothing to compute")
    assert torch.equal(flat(ahead.model), flat(at_once.model))


def test_passes_of_another_batch_or_version_are_not_used(toy: Any, make_batch: Any) -> None:
    options = options_of("grpo", kl=KL)
    at_once, ahead = (trainer_of(toy("qwen3"), options, lr=1e-2) for _ in range(2))
    batch = make_batch(seed=0)
    assert list(ahead.precompute(make_batch(seed=9), 0))
    assert ahead.step(batch, 0) == at_once.step(make_batch(seed=0), 0)
    assert list(ahead.precompute(batch, 0))
    assert ahead.step(batch, 1) == at_once.step(make_batch(seed=0), 1)


def test_passes_that_were_not_finished_are_not_used(toy: Any, make_batch: Any) -> None:
    at_once, ahead = (trainer_of(toy("qwen3"), options_of("grpo", kl=KL), lr=1e-2) for _ in range(2))
    batch = make_batch(seed=0)
    next(iter(ahead.precompute(batch, 0)))
    assert ahead.step(batch, 0) == at_once.step(make_batch(seed=0), 0)
