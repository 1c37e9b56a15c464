"""AdamW with weights in bf16, or moments in 8 bits, whose values are rounded stochastically.

A bf16 number has 8 significant bits. An update of a usual learning rate is far below half a unit of its last bit, so
rounding to nearest would lose nearly all of it. Stochastic rounding goes up or down with probabilities that make the
mean exact ("Revisiting BFloat16 Training", arXiv:2010.06192). Moments are rounded in the same way: the second one
changes by 1 % a step, which 8 bits rounded to nearest would lose as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmill.config.trainer import MOMENT_BLOCK as BLOCK
from rollmill.seeds import derive_seed
from rollmill.trainer.quantized_moments import FIRST, SECOND, empty_codes

_CHUNK = 1 << 16
"""Elements that are computed in fp32 at a time: their copies stay in a processor's cache."""
GPU_CHUNK = 1 << 24  # on a GPU: fewer kernels
_LEAST = torch.iinfo(torch.int64).min


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with weights, gradients and both moments in bf16: 8 bytes a weight instead of 16.

    With `eight_bit` the moments take 8 bits each (see quantized_moments): 6 bytes a weight in bf16, 10 in fp32.
    Computes in fp32, a part of a tensor at a time. Its random bits depend only on the seed, the step and the parameter,
    so that a resumed run rounds as an uninterrupted one, and so do all ranks; of a sharded parameter also on the
    rank.

    Args:
        params: parameters, or groups of them as for torch.optim.AdamW; all contiguous, and bf16 or, with `eight_bit`,
            fp32.

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
        eight_bit: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed, self._eight_bit = seed, eight_bit
        allowed = (torch.bfloat16, torch.float32) if eight_bit else (torch.bfloat16,)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in allowed:
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
                    state |= self._first_moments(parameter)
                state["step"] += 1
                self._update(parameter, state, group, number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Unlike torch's own, never casts a moment to the parameter's type.

        Raises:
            ValueError: the moments are of the other kind.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            stored = state_dict["state"].get(number)
            if stored is None:
                continue
            if ("exp_avg_scale" in stored) is not self._eight_bit:
                raise ValueError(f"the stored moments are{'' if 'exp_avg_scale' in stored else ' not'} in 8 bits")
            self.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device, copy=True) for key, value in stored.items()
            }
            self.state[parameter]["step"] = stored["step"].clone()

    def _first_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if not self._eight_bit:
            return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        mean, square = empty_codes(parameter, FIRST), empty_codes(parameter, SECOND)
        return {
            "exp_avg": mean[0],
            "exp_avg_scale": mean[1],
            "exp_avg_sq": square[0],
            "exp_avg_sq_scale": square[1],
        }

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], number: int) -> None:
        assert parameter.grad is not None
        taken, (beta1, beta2) = int(state["step"]), group["betas"]
        of_shard = (dist.get_rank(),) if isinstance(parameter, DTensor) else ()
        seed = derive_seed(self._seed, taken, number, *of_shard) >> 1
        generator = torch.Generator(parameter.device).manual_seed(seed)
        step_size = group["lr"] / (1 - beta1**taken)
        correction = (1 - beta2**taken) ** 0.5
        weights, gradients = _own(parameter).view(-1), _own(parameter.grad).reshape(-1)
        chunk = _CHUNK if parameter.device.type == "cpu" else GPU_CHUNK
        for start in range(0, weights.numel(), chunk):
            part = slice(start, min(start + chunk, weights.numel()))
            w, g = weights[part].float(), gradients[part].float()
            drawn = torch.empty(len(w), dtype=torch.int64, device=w.device).random_(_LEAST, None, generator=generator)
            bits = drawn.view(torch.int16).view(4, -1)
            m, v = self._moments(state, part, g, (beta1, beta2), bits[0], bits[1])
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.addcdiv_(m, v.sqrt_().div_(correction).add_(group["eps"]), value=-step_size)
            weights[part] = w if parameter.dtype == torch.float32 else round_stochastically(w, bits[2])

    def _moments(
        self, state: dict[str, Tensor], part: slice, g: Tensor, betas: tuple[float, float], *bits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Updates both moments of a part and returns them in fp32, as they are before they are rounded."""
        if self._eight_bit:
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            stored = [
                (kind, state[name][blocks], state[f"{name}_scale"][blocks])
                for kind, name in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq"))
            ]
            moments = [kind.decode(codes, scales).view(-1)[: len(g)] for kind, codes, scales in stored]
        else:
            places = [_own(state[name]).view(-1)[part] for name in ("exp_avg", "exp_avg_sq")]
            moments = [each.float() for each in places]
        m, v = moments[0].lerp_(g, 1 - betas[0]), moments[1].lerp_(g.square_(), 1 - betas[1])
        if self._eight_bit:
            for (kind, codes, scales), values, draw in zip(stored, (m, v), bits, strict=True):
                kind.encode(values, draw, codes, scales)
        else:
            for place, values, draw in zip(places, (m, v), bits, strict=True):
                place.copy_(round_stochastically(values, draw))
        return m, v


def _own(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, sharing memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
