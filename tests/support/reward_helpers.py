"""Completions that have only text, and judging them from plain functions."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rollmill.data.images import make_image_ref
from rollmill.rewards import RewardManager, RewardResult
from rollmill.types import Completion, StopReason, Task


def completion(text: str, index: int = 0) -> Completion:
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=index)


def task(answer: Any, id: str = "t1", **metadata: Any) -> Task:
    return Task(id, "question", answer, metadata=metadata)


def judged(judge: RewardManager, answer: Any, text: str, **metadata: Any) -> RewardResult:
    return asyncio.run(judge.score(task(answer, **metadata), completion(text)))


def picture(file: Path, **changes: str) -> dict[str, Any]:
    Image.new("RGB", (2, 3), "red").save(file)
    return asdict(make_image_ref(file)) | changes
