"""The replaced RMS norms are the model's own function, in value and gradient, and only inside `replaced`."""

from __future__ import annotations

import pytest
import torch
from support.toys import toy_model

from rollmill.models.cpu.norms import find_norms, rms_norm, use_fast_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_equals_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, 16, dtype=dtype).transpose(1, 2).requires_grad_()
    weight = torch.randn(16, dtype=dtype, requires_grad=True)
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    got = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, [x, weight], upstream) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_half_precision_input_is_summed_in_the_weights_type() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 16).bfloat16().requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    wide = x.detach().float().requires_grad_()
    expected, got = rms_norm(wide, weight, 1e-6), rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    upstream = torch.randn_like(expected)
    wide_grad, *rest = torch.autograd.grad(expected, [wide, weight], upstream)
    grad, *same = torch.autograd.grad(got, [x, weight], upstream)
    assert torch.equal(grad, wide_grad.bfloat16())
    assert torch.equal(*rest, *same)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_under_autocast_hidden_states_are_cast_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 7, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    upstream = torch.randn(1, 7, 16).bfloat16()
    expected = rms_norm(x, weight, 1e-6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = rms_norm(x, weight, 1e-6)
        assert rms_norm(x[:, None], weight, 1e-6).dtype == torch.float32  # heads: positions are applied to them
        with torch.no_grad():
            assert torch.equal(rms_norm(x, weight, 1e-6), expected)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    for a, b in zip(*(torch.autograd.grad(y, [x, weight], upstream) for y in (got, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("architecture", "per_layer"), [("qwen3", 4), ("llama", 2), ("gemma", 2), ("gemma2", 4)])
def test_every_norm_of_a_model_is_found_and_put_back(architecture: str, per_layer: int) -> None:
    model = toy_model(architecture)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    before = model(ids).logits
    found = find_norms(model)
    assert len(found) == 2 * per_layer + 1
    with use_fast_norms(found):
        assert all("forward" in vars(module) for module, _ in found)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module, _ in found)
    assert torch.equal(model(ids).logits, before)


def test_a_module_that_only_has_the_name_is_left_alone() -> None:
    class ScaledRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert find_norms(ScaledRMSNorm()) == []
