"""Losses on expert tokens beyond plain supervised fine-tuning, and how their share changes."""

from __future__ import annotations

import math

from torch import Tensor


def chord_sft(logprob: Tensor) -> Tensor:
    """-sg(p (1 - p)) log p: little weight for tokens the policy is sure of, either way (CHORD-phi, arXiv:2508.11408).

    [tokens]. Published with token-mean over expert tokens.
    """
    p = logprob.detach().exp()
    return -p * (1 - p) * logprob


def chord_mu(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """The share mu of the supervised loss at a training step, counted from 0 (CHORD-mu, arXiv:2508.11408).

    From 0 to `peak` in a line over `warmup` steps, then to `valley` along half a cosine over `decay` steps.
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
