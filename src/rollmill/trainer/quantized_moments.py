"""AdamW's moments in 8 bits: block-wise quantisation with a scale per block and a nonlinear map.

As in "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861) a block of 256 values is divided by its largest
magnitude, so that an outlier spoils the precision of its own block only, and small values get more codes than large
ones. That paper's map is a table, whose search takes longer on a CPU than the whole update; ours are powers, as the
companding functions of FlashOptim (arXiv:2602.23349) are closed forms: the code is a root of the value. Rounding is
stochastic, so that the mean of what is stored is exact, however slowly a moment changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.config.trainer import MOMENT_BLOCK as BLOCK


@dataclass(frozen=True, slots=True)
class MomentCode:
    """A map from codes to values: value = scale * (code / levels) ** power, with the code's sign.

    `power` is 2 for signed codes and 4 for unsigned ones: a second moment is a square, and its root then has the
    precision of a first moment.
    """

    levels: int
    power: int
    dtype: torch.dtype

    @property
    def signed(self) -> bool:
        """True if values may be negative."""
        return self.power == 2

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns float32 values [blocks, BLOCK]."""
        x = codes.float()
        x = x.mul_(x.abs()) if self.signed else x.square_().square_()
        return x.mul_((scales / float(self.levels**self.power))[:, None])

    def encode(self, values: Tensor, bits: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Stores float32 `values` [n] in `codes` [blocks, BLOCK] and `scales` [blocks]; the mean over `bits` is exact.

        An unsigned code is at least 1: a second moment of 0 under a first one that is not would make a step endless.

        Args:
            bits: int16 [n], uniform.
        """
        rest = codes.numel() - len(values)
        if rest:
            values, bits = pad(values, (0, rest)), pad(bits, (0, rest))
        blocks = values.view(codes.shape)
        y = blocks.abs()
        torch.amax(y, 1, out=scales)
        y.mul_((float(self.levels**self.power) / scales.clamp_min(torch.finfo().tiny))[:, None])
        below = y.sqrt() if self.signed else y.sqrt().sqrt_()
        below.floor_().clamp_(max=self.levels - 1)
        low = below.square()
        if self.signed:
            width = (below * 2).add_(1)
        else:
            low.square_()
            width = (below + 1).square_().square_().sub_(low)
        below.add_(y.sub_(low).div_(width))  # linear between neighbours, so that the mean of the values is exact, too
        below.add_(bits.view(codes.shape), alpha=1 / (1 << 16)).add_(0.5).floor_()
        codes.copy_(below.copysign_(blocks) if self.signed else below.clamp_(min=1))


FIRST = MomentCode(127, 2, torch.int8)
SECOND = MomentCode(255, 4, torch.uint8)


def empty_codes(parameter: Tensor, kind: MomentCode) -> tuple[Tensor, Tensor]:
    """Returns codes [blocks, BLOCK] and scales [blocks] of a moment that is 0."""
    blocks = -(-parameter.numel() // BLOCK)
    codes = torch.zeros((blocks, BLOCK), dtype=kind.dtype, device=parameter.device)
    return codes, torch.zeros(blocks, device=parameter.device)
