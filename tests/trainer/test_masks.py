"""What is chosen over whole optimizer steps, and the entropy coefficient, through the trainer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import batch_for, distance, flat, options_of, record, trainer_of, watch_gradients
from torch import Tensor

from rollmill.trainer.loss import StepLoss


def test_every_mask_tells_how_much_it_leaves_out(toy: Any, make_batch: Any) -> None:
    model, masks = toy("qwen3"), ["high_entropy", {"name": "clip_b", "mu": 0.3}]
    batch = batch_for(make_batch, options_of("grpo"))
    tokens = sum(e.action_tokens for e in batch)
    shares = []
    for chosen in ([masks[0]], [masks[1]], masks):
        metrics = trainer_of(copy.deepcopy(model), options_of("grpo", masks=chosen)).step(batch, 0)
        shares.append(metrics["ratio/masked_fraction"])
    assert 0.6 < shares[0] <= 0.8, "a fifth of the tokens, and those that tie with the last of them"
    assert 0 < shares[1] < shares[0] < shares[2] < shares[0] + shares[1] + 1 / tokens
    assert "ratio/masked_fraction" not in trainer_of(model, options_of("grpo")).step(batch, 0)


def test_a_mask_of_one_row_at_a_time_would_be_noticed(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: quantiles of rows instead of the step's change the gradient by more than a rounding."""
    gradients, original = watch_gradients(monkeypatch), StepLoss.choose

    def per_row(self: StepLoss, logprob: Tensor, entropy: Tensor, *rest: Any) -> None:
        counted, kept = self.counted, torch.ones_like(self._kept)
        for i in counted:
            self.counted = [i]
            original(self, logprob, entropy, *rest)
            kept &= self._kept
        self.counted, self._kept = counted, kept

    model, batch = toy("qwen3"), make_batch()
    for choose in (original, per_row):
        monkeypatch.setattr(StepLoss, "choose", choose)
        trainer_of(copy.deepcopy(model), options_of("grpo", masks=["high_entropy"])).step(batch, 0)
    assert distance(gradients["policy"][1], gradients["policy"][0]) > 0.05


def test_masks_follow_the_policy_from_one_update_to_the_next(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M2PO leaves nothing out while ratios are 1, and more once the policy has moved."""
    options = options_of("m2po", masks=[{"name": "second_moment", "threshold": 1e-6}])
    model, batch = toy("qwen3"), batch_for(make_batch, options)
    record(model, batch, 0.0)
    fractions: list[float] = []
    original = StepLoss.choose

    def choose(self: StepLoss, *args: Any) -> None:
        original(self, *args)
        assert self._kept is not None
        fractions.append(float((~self._kept).float().mean()))

    monkeypatch.setattr(StepLoss, "choose", choose)
    trainer_of(model, options, epochs_per_batch=3, lr=1e-2).step(batch, 0)
    assert len(fractions) == 3
    assert fractions[0] < 0.05 < fractions[1]


def test_draws_are_those_of_the_seed_and_go_on_after_a_resume(toy: Any, make_batch: Any) -> None:
    options = options_of("clip_cov", masks=[{"name": "clip_cov", "share": 0.05, "low": 0.0, "high": 9.0}])
    model, batches = toy("qwen3"), [make_batch(seed=n) for n in range(3)]
    make = partial(trainer_of, options=options)
    same, other = ([make(copy.deepcopy(model), seed=seed) for _ in range(2)] for seed in (0, 1))
    for trainer in (*same, *other):
        trainer.step(batches[0], 0)
    assert torch.equal(flat(same[0].model), flat(same[1].model))
    assert not torch.equal(flat(same[0].model), flat(other[0].model))
    resumed = make(copy.deepcopy(same[0].model), seed=5)
    resumed.load_state_dict(copy.deepcopy(same[0].state_dict()))
    for trainer in (same[0], resumed):
        trainer.step(batches[1], 1)
    assert torch.equal(flat(same[0].model), flat(resumed.model))


def test_the_entropy_coefficient_follows_the_metric_and_is_kept(toy: Any, make_batch: Any) -> None:
    """The entropy of a toy is near log 23 = 3.1 nats: a target of 4 is above it, one of .2 below."""
    for target, rising in ((4.0, True), (0.2, False)):
        options = options_of("skywork_or1", entropy=0.01, entropy_control={"target": target, "delta": 0.004})
        trainer = trainer_of(toy("qwen3"), options)
        first = trainer.step(make_batch(), 0)
        assert first["entropy_coefficient"] == 0.01
        assert first["loss"] == pytest.approx(first["loss/policy"] - 0.01 * first["loss/entropy"], abs=1e-6)
        resumed = trainer_of(copy.deepcopy(trainer.model), options)
        resumed.load_state_dict(trainer.state_dict())
        second = [each.step(make_batch(seed=1), 1) for each in (trainer, resumed)]
        assert [each["entropy_coefficient"] for each in second] == pytest.approx([0.014 if rising else 0.0] * 2)
        assert ("loss/entropy" in second[0]) == rising


def test_raft_divides_by_accepted_tokens_alone(toy: Any, make_batch: Any) -> None:
    """The loss is that of a batch of the accepted completions alone; KL and entropy have all counted tokens."""
    model, batch = toy("qwen3"), make_batch()
    metrics = trainer_of(copy.deepcopy(model), options_of("raft", entropy=0.01)).step(batch, 0)
    accepted = [e for e in batch if e.advantage is not None and e.advantage.any()]
    assert len(accepted) == len({e.group for e in batch}) < len(batch)
    alone = trainer_of(copy.deepcopy(model), options_of("raft", entropy=0.01)).step(copy.deepcopy(accepted), 0)
    assert metrics["loss/policy"] == pytest.approx(alone["loss/policy"], rel=1e-6)
    assert metrics["loss/entropy"] == pytest.approx(metrics["entropy"], rel=1e-5)
    assert metrics["loss/entropy"] != pytest.approx(alone["loss/entropy"], rel=1e-5)


def test_the_sums_over_the_vocabulary_do_not_depend_on_chunks(toy: Any, make_batch: Any) -> None:
    options = options_of("otb")
    model, batch = toy("gemma2").double(), make_batch()
    found = []
    for chunk in (None, 3):
        copied = copy.deepcopy(batch)
        trainer_of(copy.deepcopy(model), options, logprob_chunk=chunk).step(copied, 0)
        found.append(np.concatenate([e.advantage for e in copied]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert np.abs(found[0]).max() > 0.1
