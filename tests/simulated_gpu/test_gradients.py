"""Gradients in bf16, by the kernels of a GPU, are those in fp32 up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine_gaps import scored_batch
from support.simulated_cuda.trace import Trace
from support.toys import toy_model

from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode, set_gradient_checkpointing

pytestmark = pytest.mark.gpu

ERRORS = {"qwen3": 0.1, "gemma2": 0.1, "qwen3_moe": 0.2}
"""Most that a parameter's gradient may be off, relative to its norm; a wrong kernel is off by about 1. In a mixture of
experts a router may choose another expert where two scores are close."""


def gradients(model: Any, experiences: Any, *, bf16: bool, checkpointing: bool) -> dict[str, torch.Tensor]:
    device = torch.device("cuda")
    table = build_token_table(experiences, device)
    [micro] = build_micro_batches(experiences, table, range(len(experiences)), 100_000, device)
    set_gradient_checkpointing(model, checkpointing)
    with evaluation_mode(model), use_packed_attention(model, micro):
        compute_logprobs(model, micro, table, bf16=bf16)[0].sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ERRORS)
def test_gradients_in_bf16_are_those_in_fp32(architecture: str, checkpointing: bool) -> None:
    """Of packed rows, whose attention in bf16 is the flash kernel with limits of rows, forward and backward."""
    model = toy_model(architecture).cuda().train()
    experiences = scored_batch(model)
    exact = gradients(model, experiences, bf16=False, checkpointing=False)
    rounded = gradients(model, experiences, bf16=True, checkpointing=checkpointing)
    assert exact.keys() == rounded.keys()
    for name, each in exact.items():
        assert rounded[name].dtype == torch.float32
        assert (rounded[name] - each).norm() / each.norm() < ERRORS[architecture], name


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_multiplied_together(checkpointing: bool) -> None:
    """In one kernel, not in one product per expert with a wait after each."""
    model = toy_model("qwen3_moe").cuda().train()
    experiences = scored_batch(model)
    with Trace() as trace:
        found = gradients(model, experiences, bf16=True, checkpointing=checkpointing)
    assert [name for name in found if "experts" in name]
    assert not [name for name in trace.ops if "one product per expert" in name]
