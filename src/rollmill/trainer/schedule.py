"""Learning-rate schedules."""

from __future__ import annotations

import math

from rollmill.config.trainer import TrainerConfig


def compute_learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step `step` (0-based) of `total_steps`.

    Warm-up rises linearly to `lr`, which step `warmup_steps - 1` reaches. Afterwards linear and cosine fall from `lr`
    towards `min_lr_ratio * lr`, which they would reach at step `total_steps`; constant stays.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    share = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
