"""Completions that have only text, and judging them from plain functions."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rollmill.rewards import RewardManager, RewardResult
from rollmill.types import Completion, StopReason, Task


def completion(text: str, index: int = 0) -> Completion:
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=index)


def task(answer: Any, id: str = "t1", **metadata: Any) -> Task:
    return Task(id, "question", answer, metadata=metadata)


def judged(judge: RewardManager, answer: Any, text: str, **metadata: Any) -> RewardResult:
    return asyncio.run(judge.score(task(answer, **metadata), completion(text)))
