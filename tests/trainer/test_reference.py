"""What a KL penalty is to: a frozen copy, a refreshed one, the adapters of the stage's start, a given model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.algorithm_batches import flat, options_of, trainer_of

from rollmill.config.model import LoRAConfig
from rollmill.models.lora import add_lora
from rollmill.trainer import Trainer

KL = {"coefficient": 0.1}


def _adapted(toy: Any) -> Any:
    model = toy("qwen3")
    add_lora(model, LoRAConfig(rank=4), seed=0)
    return model


def _kl(trainer: Trainer, make_batch: Any, steps: int) -> list[float]:
    return [trainer.step(make_batch(seed=n), n)["kl_ref"] for n in range(steps)]


def test_with_lora_the_reference_is_the_policy_at_the_start_of_each_stage(toy: Any, make_batch: Any) -> None:
    model = _adapted(toy)
    for _ in range(2):
        trainer = trainer_of(model, options_of("grpo", kl=KL), lr=1e-2)
        assert trainer._reference.model is None
        found = _kl(trainer, make_batch, 3)
        assert found[0] == 0
        assert min(found[1:]) > 0


def test_with_lora_only_the_adapters_move(toy: Any, make_batch: Any) -> None:
    model = _adapted(toy)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = trainer_of(model, options_of("grpo", kl=KL), lr=1e-2)
    _kl(trainer, make_batch, 2)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    assert all(".lora_" in name for name in trainer.state_dict()["reference"])


@pytest.mark.parametrize("refresh", [None, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_references_resume_exactly(toy: Any, make_batch: Any, lora: bool, refresh: int | None) -> None:
    options = options_of("grpo", kl=KL if refresh is None else KL | {"refresh_every": refresh})
    model = _adapted(toy) if lora else toy("qwen3")
    trainer = trainer_of(model, options, lr=1e-2)
    _kl(trainer, make_batch, 3)
    saved = copy.deepcopy((model.state_dict(), trainer.state_dict()))
    other = _adapted(toy) if lora else toy("qwen3", seed=3)
    resumed = trainer_of(other, options, lr=1e-2)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert _kl(resumed, make_batch, 2) == _kl(trainer, make_batch, 2)
    assert torch.equal(flat(other), flat(model))


def test_a_given_reference_is_never_refreshed(toy: Any, make_batch: Any) -> None:
    given = toy("qwen3", seed=5)
    before = flat(given)
    options = options_of("grpo", kl=KL | {"refresh_every": 1})
    _kl(trainer_of(toy("qwen3"), options, reference=given, lr=1e-2), make_batch, 3)
    assert torch.equal(flat(given), before)
