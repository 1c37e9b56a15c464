"""Losses on expert tokens beyond plain supervised fine-tuning, and how their share changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_sft(logprob: Tensor) -> Tensor:
    """-sg(p) log p: imitation weighted by the ratio of policy to expert, whose probability is taken to be 1. [tokens].

    CHORD's SFT with importance sampling (arXiv:2508.11408, eq. 4); the same is known as DFT (arXiv:2508.05629). Its
    gradient is that of -p. Published with token-mean over expert tokens.
    """
    return -logprob.detach().exp() * logprob


def chord_sft(logprob: Tensor, *, cutoff: float = 1.0) -> Tensor:
    """-sg(p (1 - p)) min(log p, log cutoff): little weight for tokens the policy is sure of, either way. [tokens].

    CHORD-phi (arXiv:2508.11408), published with token-mean over expert tokens. A `cutoff` below 1 takes the gradient
    away where p is above it, as in Trinity-RFT's `sft_phi`.
    """
    p = logprob.detach().exp()
    capped = logprob if cutoff == 1 else torch.clamp(logprob, max=math.log(cutoff))
    return -p * (1 - p) * capped


def chord_mu(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """The share mu of the supervised loss at a training step, counted from 0 (CHORD-mu, arXiv:2508.11408).

    From 0 to `peak` in a line over `warmup` steps, then to `valley` along half a cosine over `decay` steps.
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
