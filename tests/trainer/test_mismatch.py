"""Engine/trainer mismatch of stale tokens: exact, with the weights that made them, and without effect on training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import LIMIT, flat, options_of, record, trainer_of
from torch import nn

from rollmill.config.trainer import TrainerConfig
from rollmill.trainer import DistributedTrainer, Trainer
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.spec import TrainerSpec
from rollmill.trainer.mismatch import PROBED_COMPLETIONS, WeightHistory
from rollmill.types import IMPORTED_FROM, Experience

EXACT = 1e-5
"""Most that log-probs of the same weights differ by in fp32, whatever shares a row with them."""


def made(make_batch: Any, model: Any, version: int, *, seed: int, wrong: float = 0.0, groups: int = 3) -> Any:
    """A batch whose log-probs are those of the model, off by `wrong` at every token."""
    batch = make_batch(seed=seed, version=version, groups=groups)
    record(model, batch, 0.0)
    for each in batch:
        each.id, each.group = f"{seed}-{each.id}", f"{seed}-{each.group}"
        each.logprobs = np.where(each.action_mask, each.logprobs + wrong, 0).astype(np.float32)
    return batch


def of(toy: Any, **settings: Any) -> Trainer:
    options = settings.pop("options", options_of("grpo"))
    trainer: Trainer = trainer_of(toy("qwen3"), options, lr=1e-2, kept_versions=settings.pop("kept", 0), **settings)
    return trainer


@pytest.mark.parametrize("wrong", [0.0, 0.25])
def test_tokens_that_come_late_are_compared_with_the_weights_that_made_them(
    toy: Any, make_batch: Any, wrong: float
) -> None:
    trainer, models = of(toy, kept=2), []
    for version in range(4):
        models.append(copy.deepcopy(trainer.model))
        age = min(version, 2)
        batch = made(make_batch, models[version - age], version - age, seed=version, wrong=wrong)
        metrics = trainer.step(batch, version)
        assert metrics["logprob_gap/mean"] == pytest.approx(wrong, abs=EXACT)
        assert metrics["logprob_gap/max"] == pytest.approx(wrong, abs=EXACT)
        assert metrics["logprob_gap/tokens"] > 0
        assert (metrics["policy_drift/mean"] > wrong + 0.01) or not age


def test_completions_of_later_steps_are_compared_before_their_version_ends(toy: Any, make_batch: Any) -> None:
    trainer = of(toy)
    now, later, latest = (made(make_batch, trainer.model, 0, seed=seed, wrong=0.1 * seed) for seed in range(3))
    first = trainer.step(now, 0, trainer.to_compare([later, latest], now, 0))
    assert first["logprob_gap/max"] < EXACT
    assert trainer.to_compare([latest], later, 1) == []  # known already
    second, third = trainer.step(later, 1), trainer.step(latest, 2)
    assert second["logprob_gap/mean"] == pytest.approx(0.1, abs=EXACT)
    assert third["logprob_gap/max"] == pytest.approx(0.2, abs=EXACT)
    assert 0 < second["logprob_gap/tokens"] < second["tokens"]


def test_a_sample_is_small_and_of_different_groups(toy: Any, make_batch: Any) -> None:
    trainer = of(toy)
    later = made(make_batch, trainer.model, 0, seed=1, groups=9)
    chosen = trainer.to_compare([later], later, 0)
    assert len({each.group for each in chosen}) == len(chosen) == PROBED_COMPLETIONS
    long = [longer(each, 3000) for each in later]
    cut = trainer.to_compare([long], later, 0)
    assert max(len(each.token_ids) for each in cut) <= 1024 / PROBED_COMPLETIONS
    assert all(len(each.token_ids) > 3000 for each in long)


def longer(experience: Experience, tokens: int) -> Experience:
    """The experience with so many more tokens of the same version."""
    arrays = ("token_ids", "action_mask", "logprobs", "versions")
    more = {name: np.pad(getattr(experience, name), (0, tokens), mode="edge") for name in arrays}
    return replace(experience, **more)


def test_where_nothing_can_be_compared_the_last_comparison_is_told(toy: Any, make_batch: Any) -> None:
    trainer = of(toy)
    assert "logprob_gap/mean" not in trainer.step(made(make_batch, trainer.model, 0, seed=0), 3)
    before = trainer.step(made(make_batch, trainer.model, 4, seed=1, wrong=0.5), 4)
    after = trainer.step(made(make_batch, trainer.model, 2, seed=2), 5)
    assert after["logprob_gap/mean"] == before["logprob_gap/mean"] == pytest.approx(0.5, abs=EXACT)
    assert (before["logprob_gap/tokens"], after["logprob_gap/tokens"]) == (before["tokens"], 0)


def test_tokens_of_another_run_are_not_compared_though_their_versions_match(toy: Any, make_batch: Any) -> None:
    trainer = of(toy, kept=2)
    batch = made(make_batch, trainer.model, 0, seed=0, wrong=0.5)
    imported = made(make_batch, trainer.model, 0, seed=1)
    for each in imported:
        each.info = {IMPORTED_FROM: "other"}
        each.logprobs = (each.logprobs - 3).astype(np.float32)
    metrics = trainer.step([*batch, *imported], 0)
    assert metrics["logprob_gap/max"] == pytest.approx(0.5, abs=EXACT)
    assert metrics["policy_drift/max"] == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("proximal", ["rollout", "recompute"])
def test_updates_within_a_step_are_drift_and_no_mismatch(toy: Any, make_batch: Any, proximal: str) -> None:
    trainer = of(toy, options=options_of("grpo", proximal=proximal), updates_per_batch=3)
    metrics = trainer.step(made(make_batch, trainer.model, 0, seed=0), 0)
    assert metrics["logprob_gap/max"] < EXACT
    assert (metrics["logprob_gap/tokens"] == metrics["tokens"]) is (proximal == "recompute")
    assert (metrics["policy_drift/max"] < EXACT) is (proximal == "recompute")


def test_a_critic_that_learns_alone_does_not_hide_the_mismatch(toy: Any, make_batch: Any) -> None:
    trainer = of(toy, options=options_of("ppo", critic={"lr": 1e-3, "warmup_steps": 1}))
    metrics = trainer.step(made(make_batch, trainer.model, 0, seed=0, wrong=0.3), 0)
    assert metrics["logprob_gap/mean"] == pytest.approx(0.3, abs=EXACT)


def test_drift_is_the_rollouts_distance_from_the_policy(toy: Any, make_batch: Any) -> None:
    trainer = of(toy)
    metrics = trainer.step(made(make_batch, trainer.model, 0, seed=0), 0)
    assert metrics["policy_drift/max"] < EXACT  # on-policy
    off = made(make_batch, trainer.model, 0, seed=1, wrong=0.25)
    metrics = trainer.step(off, 2)
    names = ("mean", "max", "k1")
    assert [metrics[f"policy_drift/{name}"] for name in names] == pytest.approx([0.25] * 3, abs=EXACT)


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith("logprob_gap/")}


@pytest.mark.slow
def test_comparing_changes_no_number_of_the_training_nor_does_resuming(toy: Any, make_batch: Any) -> None:
    options = options_of("ppo", kl=0.1, critic={"lr": 1e-3})
    with_it, without = (of(toy, kept=kept, options=options, updates_per_batch=2) for kept in (2, 0))
    states: list[Any] = []

    def batches(model: nn.Module) -> Sequence[Any]:
        return [made(make_batch, model, version, seed=version) for version in (0, 0, 1, 1, 3)]

    model = copy.deepcopy(with_it.model)
    found = []
    for version, batch in enumerate(batches(model)):
        upcoming = [made(make_batch, model, version, seed=10 + version)]
        found.append(with_it.step(batch, version, with_it.to_compare(upcoming, batch, version)))
        states.append((copy.deepcopy(with_it.state_dict()), copy.deepcopy(with_it.model)))
    plain = [without.step(batch, version) for version, batch in enumerate(batches(model))]
    assert [numbers(each) for each in found] == [numbers(each) for each in plain]
    assert torch.equal(flat(with_it.model), flat(without.model))

    resumed = of(toy, kept=2, options=options, updates_per_batch=2)
    state, weights = states[3]
    resumed.model.load_state_dict(weights.state_dict())
    resumed.load_state_dict(state)
    assert resumed._mismatch.state_dict() == state["mismatch"]
    again = resumed.step(batches(model)[4], 4)
    assert numbers(again) == numbers(found[4])
    assert torch.equal(flat(resumed.model), flat(with_it.model))


def test_kept_weights_come_and_go_bit_for_bit(toy: Any) -> None:
    model = toy("qwen3").double()
    kept, seen = WeightHistory(model, 2, RankGroup()), []
    for version in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        seen.append(flat(model).clone())
        kept.keep(version)
    assert kept.before(5) == [3, 4]
    assert kept.before(4) == [2, 3]
    for version in (2, 3):
        with kept.loaded(version, 4):
            assert torch.equal(flat(model), seen[version])
        assert torch.equal(flat(model), seen[4])
    kept.keep(3)  # a step is made again
    assert kept.before(9) == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["tensor", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("none", "fsdp"))]
)
def test_ranks_compare_late_tokens_with_the_parts_they_hold(
    toy: Any, make_batch: Any, tmp_path: Path, sharding: str
) -> None:
    settings = TrainerConfig(lr=1e-2, ranks=2, sharding=sharding)
    plan = TrainerSpec(options_of("grpo"), settings, "fp32", 10, LIMIT, seed=3, kept_versions=2)
    model = toy("qwen3")
    alone = of(toy, kept=2)
    trainer = DistributedTrainer(plan, model, None, torch.device("cpu"), tmp_path)
    try:
        first = copy.deepcopy(model)
        for version in range(3):
            batch = made(make_batch, first, 0, seed=version, wrong=0.25)
            alone.step(copy.deepcopy(batch), version)
            metrics = trainer.step(batch, version, trainer.to_compare([], batch, version))
            assert metrics["logprob_gap/mean"] == pytest.approx(0.25, abs=EXACT)
            assert metrics["logprob_gap/tokens"] > 0
        trainer.gather_policy()
        assert torch.allclose(flat(model), flat(alone.model), atol=1e-4)
        assert not torch.allclose(flat(model), flat(first), atol=1e-3)
    finally:
        trainer.close()
