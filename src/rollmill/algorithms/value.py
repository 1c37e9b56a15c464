"""Losses of value functions: per-token terms [tokens], to be minimised."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), as in PPO2 (baselines). [tokens].

    V_old is the value at the start of the update. `clip` None: .5 (V - R)^2. Published with token-mean.
    """
    error = (value - returns) ** 2
    if clip is not None:
        near = torch.clamp(value, old_value - clip, old_value + clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return 0.5 * error
