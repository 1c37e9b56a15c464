"""RMS norms with few passes over memory, which replace a model's own while it computes in fp32 on a CPU.

transformers computes RMS norm in six elementwise operations with as many temporaries, and autograd doubles them; on a
small model that is a tenth of a step. A module is replaced only if a measurement shows that it computes the same
function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NormReplacements = list[tuple[nn.Module, Callable[[Tensor], Tensor]]]


class _RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), returned in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(weight.dtype)
        scale = _scale(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        # The layer norm kernel with mean 0 gives scale * (gw - mean(gw) - x^ mean(gw x^)), gw = grad * weight, in one
        # pass; adding scale * mean(gw) makes it RMS norm's.
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        grad, scale = grads[0].reshape(-1, size).to(weight.dtype), scale.reshape(-1, 1)
        wide = x.reshape(-1, size).to(weight.dtype)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, wide, [size], torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        grad_x.addcmul_(torch.mv(grad, weight).div_(size)[:, None], scale)
        return grad_x.view(x.shape).to(x.dtype), grad_weight, None, None


def _scale(x: Tensor, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension of `x`, computed and returned in the weight's type (float32 or float64).

    Under autocast, norms of hidden states [1, T, d] are returned in its type: the linear layers that read them would
    each cast them.
    """
    reads = x.ndim == 3 and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if reads else weight.dtype
    if not torch.is_grad_enabled():
        wide = x.to(weight.dtype)
        return (wide * _scale(wide, eps)).mul_(weight).to(dtype)
    result: Tensor = _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return result


def is_fp32_on_cpu(model: nn.Module) -> bool:
    """True if `rms_norm` is worth using: GPUs have faster kernels, and lower precisions round at other places."""
    return all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


def find_norms(*models: nn.Module) -> NormReplacements:
    """Finds RMS norms that multiply by `weight` or by `1 + weight`; returns each with a replacement of its forward."""
    modules = [module for model in models for module in model.modules()]
    return [(module, forward) for module in modules if (forward := _replacement(module)) is not None]


@contextmanager
def use_fast_norms(replacements: NormReplacements) -> Iterator[None]:
    """Context in which the modules found by `find_norms` use their replacement."""
    for module, forward in replacements:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in replacements:
            del module.forward


@torch.no_grad()
def _replacement(module: Any) -> Any:
    """Returns a function equal to `module.forward`, or None if it is not an RMS norm of a known form."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    tried = module
    if weight.is_meta:  # a rank that gets its weights later
        tried = copy.deepcopy(module).to_empty(device="cpu")
        weight = tried.weight.normal_(generator=generator)
    x = torch.randn(2, len(weight), generator=generator).to(weight)
    expected = tried(x)
    for form in (rms_norm, _offset):
        if torch.allclose(form(x, weight, eps), expected, rtol=1e-5, atol=1e-6):
            return partial(_through, form, module, eps)
    return None


def _through(form: Callable[[Tensor, Tensor, float], Tensor], module: Any, eps: float, x: Tensor) -> Tensor:
    """Calls `form` with the module's current weight: a sharded model's is another tensor while it computes."""
    return form(x, module.weight, eps)


def _offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, 1 + weight, eps)
