"""Synthetic rollouts as experiences."""

from __future__ import annotations

import math

import numpy as np

from bench.peers.rollouts import Rollouts, mean_id
from rollmill.types import Experience


def experiences(rollouts: Rollouts, vocab: int) -> list[Experience]:
    """Make one experience for each completion, sampled by version 0 from a uniform distribution."""
    batch = []
    for number, (prompt, completions) in enumerate(rollouts):
        for index, completion in enumerate(completions):
            action_mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
            batch.append(
                Experience(
                    id=f"{number}-{index}",
                    task_id=str(number),
                    group=str(number),
                    token_ids=np.asarray(prompt + completion, np.int32),
                    action_mask=action_mask,
                    logprobs=np.where(action_mask, -math.log(vocab), 0).astype(np.float32),
                    versions=np.where(action_mask, 0, -1).astype(np.int32),
                    reward=mean_id(completion),
                )
            )
    return batch
