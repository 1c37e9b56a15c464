"""Training a mixture of experts in bf16 with fp32 weights multiplies all experts in one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.test_budgets import batch
from support.simulated_cuda.trace import Trace
from support.toys import toy_model

from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode, set_gradient_checkpointing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("simulated")]


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
def test_experts_are_multiplied_together(checkpointing: bool) -> None:
    model = toy_model("qwen3_moe").cuda().train()
    experiences = batch(model)
    exact = gradients(model, experiences, bf16=False, checkpointing=False)
    with Trace() as trace:
        rounded = gradients(model, experiences, bf16=True, checkpointing=checkpointing)
    assert not [name for name in trace.ops if "one product per expert" in name]
    assert [name for name in exact if "experts" in name]
    for name, each in exact.items():
        assert rounded[name].dtype == torch.float32
        error = (rounded[name] - each).norm() / each.norm()
        assert error < 0.3, name  # bf16 rounds, and a router may choose another expert where two scores are close
