"""One reward, given by its keys, on texts and tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rollmill.config.rewards import RewardConfig
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.types import Completion
from support.reward_helpers import completion, judged, task

ADAPTER: TypeAdapter[Any] = TypeAdapter(RewardConfig)


def judge_of(name: str, **keys: Any) -> RewardManager:
    return build_reward_manager([ADAPTER.validate_python({"name": name, **keys})])


def verdict(name: str, gold: Any, text: str, metadata: dict[str, Any] | None = None, **keys: Any) -> tuple[Any, str]:
    """The reward and the outcome."""
    with judge_of(name, **keys) as judge:
        found = judged(judge, gold, text, **(metadata or {}))
    return found.reward, found.outcomes[name]


def reward(name: str, gold: Any, text: str, metadata: dict[str, Any] | None = None, **keys: Any) -> Any:
    return verdict(name, gold, text, metadata, **keys)[0]


def tokens(count: int, index: int = 0, text: str = "") -> Completion:
    """A completion of so many tokens, all different."""
    made = completion(text, index)
    made.token_ids = np.arange(count, dtype=np.int32)
    return made


def group(judge: RewardManager, gold: Any, completions: Sequence[Completion], **metadata: Any) -> list[RewardResult]:
    return asyncio.run(judge.score_group(task(gold, **metadata), completions))
