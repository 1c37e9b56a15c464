"""KTO in the trainer: its baseline over the whole step, against the formula written out."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import (
    batch_for,
    distance,
    gradient,
    options_of,
    padded_logprobs,
    trainer_of,
    watch_gradients,
)
from torch import Tensor

from rollmill.trainer import update as update_module
from rollmill.trainer.kto_baseline import build_mismatched_experiences
from rollmill.types import Experience

LR = 3e-3


def _parts(e: Experience) -> tuple[list[int], list[int], list[bool]]:
    """Prompt, what follows, and which of that counts."""
    start = e.action_mask.tolist().index(True)
    return e.token_ids[:start].tolist(), e.token_ids[start:].tolist(), e.action_mask[start:].tolist()


def _swapped(batch: list[Experience]) -> list[Experience]:
    """Each prompt before the nearest earlier completion (cyclically) of another prompt."""
    found = []
    for i, e in enumerate(batch):
        prompt = _parts(e)[0]
        n = i - 1
        while _parts(batch[n])[0] == prompt:
            n -= 1
        _, tokens, counts = _parts(batch[n])
        other = copy.deepcopy(e)
        other.token_ids = np.array(prompt + tokens, np.int32)
        other.action_mask = np.array([False] * len(prompt) + counts)
        found.append(other)
    return found


def _baseline(model: Any, reference: Any, batch: list[Experience], chosen: list[int] | None = None) -> Tensor:
    others = _swapped(batch)
    with torch.no_grad():
        pairs = zip(padded_logprobs(model, others), padded_logprobs(reference, others), strict=True)
        ratios = torch.stack([own.sum() - ref.sum() for own, ref in pairs])
    return ratios[chosen if chosen is not None else slice(None)].mean().clamp(min=0)


def _loss(model: Any, reference: Any, batch: list[Experience], z0: Tensor, beta: float, weights: Any) -> Tensor:
    with torch.no_grad():
        references = [each.sum() for each in padded_logprobs(reference, batch)]
    terms = []
    for e, lp, ref in zip(batch, padded_logprobs(model, batch), references, strict=True):
        gain = beta * (lp.sum() - ref - z0)
        terms.append(weights[0] * (1 - torch.sigmoid(gain)) if e.reward else weights[1] * (1 - torch.sigmoid(-gain)))
    return torch.stack(terms).mean()


def _near(toy: Any) -> Any:
    """A reference from which the policy has moved towards most of the batch's tokens."""
    reference = toy("qwen3")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.02)
    return reference


def test_loss_and_gradient_equal_the_formula_at_every_update(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline is that of the policy of the moment: the second pass has another."""
    options = options_of("kto", beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    model, reference = toy("qwen3"), _near(toy)
    batch = batch_for(make_batch, options)
    once = trainer_of(model, options, reference=copy.deepcopy(reference), lr=LR)
    twice = trainer_of(copy.deepcopy(model), options, reference=copy.deepcopy(reference), lr=LR, epochs_per_batch=2)
    losses, expected, baselines = [], [], []
    for n in range(2):
        z0 = _baseline(model, reference, batch)
        loss = _loss(model, reference, batch, z0, 0.2, (1.3, 0.7))
        losses.append(loss.item())
        baselines.append(z0.item())
        expected.append(gradient(loss, model))
        if n == 0:
            metrics = once.step(batch, 0)
            assert metrics["loss"] == pytest.approx(losses[0], rel=1e-5)
            assert metrics["labels/baseline"] == pytest.approx(z0.item(), rel=1e-4)
    assert baselines[0] > 0.01
    assert baselines[1] != pytest.approx(baselines[0], rel=1e-3)
    gradients = watch_gradients(monkeypatch)
    assert twice.step(batch, 0)["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    for got, want in zip(gradients["policy"], expected, strict=True):
        assert distance(got, want) < 1e-5


def test_each_update_has_the_baseline_of_its_own_completions(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of("kto")
    model, reference = toy("qwen3"), _near(toy)
    batch, seen = batch_for(make_batch, options), []
    original = update_module.compute_kto_baseline

    def spy(*args: Any) -> Tensor:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(update_module, "compute_kto_baseline", spy)
    before = copy.deepcopy(model)
    trainer_of(model, options, reference=reference, updates_per_batch=2, lr=1e-9).step(batch, 0)
    half = len(batch) // 2
    expected = [_baseline(before, reference, batch, part) for part in ([*range(half)], [*range(half, len(batch))])]
    assert [each.item() for each in seen] == pytest.approx([each.item() for each in expected], rel=1e-4, abs=1e-6)


def test_a_policy_that_is_its_reference_has_no_baseline(toy: Any, make_batch: Any) -> None:
    options = options_of("kto")
    metrics = trainer_of(toy("qwen3"), options).step(batch_for(make_batch, options), 0)
    assert metrics["labels/baseline"] == 0
    assert metrics["loss"] == pytest.approx(0.5)
    assert metrics["labels/accuracy"] == 0.5


def test_training_moves_log_ratios_to_their_sides(toy: Any, make_batch: Any) -> None:
    options = options_of("kto")
    batch = batch_for(make_batch, options)
    trainer = trainer_of(toy("qwen3"), options, lr=LR)
    first, *_, last = [trainer.step(batch, n) for n in range(30)]
    assert last["loss"] < first["loss"] - 0.05
    assert last["labels/desirable"] > 0.1 > -0.1 > last["labels/undesirable"]
    assert last["labels/accuracy"] > 0.9


def test_mismatched_completions_follow_prompts_that_are_not_their_own(make_batch: Any) -> None:
    batch = batch_for(make_batch, options_of("kto"))
    found = build_mismatched_experiences(batch, None)
    for got, want in zip(found, _swapped(batch), strict=True):
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.action_mask.tolist() == want.action_mask.tolist()
    distinct = [e for n, e in enumerate(batch) if _parts(e)[0] not in [_parts(other)[0] for other in batch[:n]]]
    rotated = [_parts(e)[1] for e in build_mismatched_experiences(distinct, None)]
    assert rotated == [_parts(e)[1] for e in (distinct[-1], *distinct[:-1])]


def test_mismatched_sequences_are_cut_at_the_models_context(make_batch: Any) -> None:
    batch = batch_for(make_batch, options_of("kto"))
    whole = build_mismatched_experiences(batch, None)
    longest = max(len(e.token_ids) for e in whole)
    for got, want in zip(build_mismatched_experiences(batch, longest - 4), whole, strict=True):
        assert got.token_ids.tolist() == want.token_ids[: longest - 4].tolist()
        assert len(got.action_mask) == len(got.logprobs) == len(got.versions) == len(got.token_ids)


def test_one_prompt_alone_is_compared_with_itself(toy: Any, make_batch: Any) -> None:
    """There is no other prompt, so that nothing is mismatched: the step is made all the same."""
    options = options_of("kto")
    batch = [e for e in batch_for(make_batch, options) if e.id.startswith("g0")]
    assert np.isfinite(trainer_of(toy("qwen3"), options, reference=_near(toy)).step(batch, 0)["loss"])
