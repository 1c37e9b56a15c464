"""The native engine on a CUDA device draws what it draws on a CPU, and attention takes a kernel that the GPU has."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.engine_gaps import rolled_out, trained_gaps
from support.simulated_cuda.trace import Trace
from support.toys import toy_model

from bench.tiny_architectures import VOCABULARY, tiny_model
from rollmill.models import attention

pytestmark = pytest.mark.gpu

SIMULATED = os.environ.get("SIMULATED_CUDA") == "1"
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize("sampling", [{}, TRUNCATED], ids=["plain", "truncated"])
def test_tokens_are_those_that_a_cpu_draws(sampling: dict[str, Any]) -> None:
    """In fp32, through a change of the cache's bucket, captured steps on one side and exact shapes on the other."""
    found = {}
    for device in ("cpu", "cuda"):
        model = toy_model("qwen3").to(device)
        found[device], counts = rolled_out(model, vocabulary=130, new_tokens=45, dtype=torch.float32, **sampling)
        assert bool(counts["decode_replays"]) == (device == "cuda")
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)


def test_a_model_that_waits_for_the_device_is_decoded_without_captures(caplog: pytest.LogCaptureFixture) -> None:
    model = toy_model("qwen3").cuda()
    expected, _ = rolled_out(model, vocabulary=130, new_tokens=30, dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda module, given, found: float(found.sum()) and None)
    with caplog.at_level(logging.WARNING, "rollmill"):
        found, counts = rolled_out(model, vocabulary=130, new_tokens=30, dtype=torch.float32)
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in expected]
    assert (counts["decode_replays"], counts["decode_captures"]) == (0, 1)  # tried once
    assert "cannot be captured" in caplog.text


def require_agreement(model: Any, vocabulary: int = 130, *, flash: bool) -> None:
    """Prefill and training agree, and attend by the flash kernel or without it, which the simulated device counts."""
    with Trace() if SIMULATED else nullcontext() as trace:
        experiences, _ = rolled_out(model.cuda(), vocabulary=vocabulary, new_tokens=4)
        gaps = trained_gaps(model, experiences)
    assert float(gaps.mean()) < 0.05  # both compute in bf16
    if trace is not None:
        assert flash == any("flash" in name or "varlen" in name for name in trace.ops)


def test_attention_by_the_flash_kernel() -> None:
    require_agreement(toy_model("qwen3"), flash=True)


def test_a_kernel_that_takes_no_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11."""
    kernel = attention.varlen_attn

    def without_groups(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Any:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    monkeypatch.setattr(attention, "varlen_attn", without_groups)
    require_agreement(toy_model("qwen3"), flash=True)


@pytest.mark.parametrize("size", [20, 264])
def test_head_sizes_that_the_flash_kernel_lacks(size: int) -> None:
    """It takes multiples of 8 up to 256."""
    require_agreement(toy_model("qwen3", head_dim=size, num_hidden_layers=1), flash=False)


def test_heads_whose_values_have_another_size() -> None:
    """As in multi-head latent attention."""
    require_agreement(tiny_model("deepseek_v3"), VOCABULARY, flash=False)


def test_a_gpu_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel refuses it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    require_agreement(toy_model("qwen3"), flash=False)


def test_decay_rates_that_are_buffers_follow_the_weights() -> None:
    """MiniMax multiplies them with activations, which are in bf16, in one product."""
    model = tiny_model("minimax").cuda()
    experiences, _ = rolled_out(model, vocabulary=VOCABULARY, new_tokens=12)
    assert float(trained_gaps(model, experiences).mean()) < 0.05
