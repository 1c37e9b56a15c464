"""AdamW for weights in bf16, whose updates are rounded stochastically.

A bf16 number has 8 significant bits. An update of a usual learning rate is far below half a unit of its last bit, so
rounding to nearest would lose nearly all of it. Stochastic rounding goes up or down with probabilities that make the
mean exact ("Revisiting BFloat16 Training", arXiv:2010.06192). Moments are kept in bf16 and rounded in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rollmill.seeds import derive_seed

_CHUNK = 1 << 21
"""Elements that are computed in fp32 at a time: their copies take some 60 MiB."""


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with weights, gradients and both moments in bf16: 8 bytes a weight instead of 16.

    Computes in fp32, a part of a tensor at a time. Its random bits depend only on the seed, the step and the parameter,
    so that a resumed run rounds as an uninterrupted one, and so do all ranks.

    Args:
        params: parameters, or groups of them as for torch.optim.AdamW; all contiguous and bf16.

    Raises:
        ValueError: a parameter has another type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed = seed
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.bfloat16:
                    raise ValueError(f"StochasticAdamW takes bf16 parameters, not {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the parameters' gradients. Parameters without one stay."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                self._update(parameter, state, group, number)

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], number: int) -> None:
        taken, (beta1, beta2) = int(state["step"]), group["betas"]
        generator = torch.Generator(parameter.device).manual_seed(derive_seed(self._seed, taken, number) >> 1)
        step_size = group["lr"] / (1 - beta1**taken)
        correction = (1 - beta2**taken) ** 0.5
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        parts = [each.view(-1).split(_CHUNK) for each in tensors if each is not None]
        for weight, gradient, mean, square in zip(*parts, strict=True):
            w, g = weight.float(), gradient.float()
            m, v = mean.float().lerp_(g, 1 - beta1), square.float().lerp_(g.square_(), 1 - beta2)
            bits = torch.empty((w.numel(), 4), dtype=torch.int16, device=w.device)
            bits.view(torch.int64).random_(generator=generator)  # below 2**63: three of the four fields are uniform
            first = 0 if sys.byteorder == "little" else 1
            _store_rounded(mean, m, bits[:, first])
            _store_rounded(square, v, bits[:, first + 1])
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.addcdiv_(m, v.sqrt_().div_(correction).add_(group["eps"]), value=-step_size)
            _store_rounded(weight, w, bits[:, first + 2])


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round to bf16 so that the mean over `bits` is exact.

    Args:
        values: float32, finite.
        bits: int16 of the same shape, uniform.

    Returns:
        the two neighbours in bf16, the nearer one more often; a value that bf16 has is returned as it is.
    """
    raised = values.contiguous().view(torch.int32) + (bits.to(torch.int32) & 0xFFFF)
    return (raised & -0x10000).view(torch.float32).to(torch.bfloat16)


def _store_rounded(into: Tensor, values: Tensor, bits: Tensor) -> None:
    into.copy_(round_stochastically(values, bits))
