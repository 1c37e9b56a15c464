"""Rolls out tasks: encode the prompt, sample a group of completions, judge each the moment it ends.

An explorer knows an engine, a judge and a tokenizer; it does not know who trains or who asks.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.core.types import Completion, Experience, Task, experience_from_completion
from rollmill.engines.base import Request, RolloutEngine
from rollmill.rewards import Judge
from rollmill.tasks import encode_prompt, prompt_text


class PromptEncoder(Protocol):
    """Turns a task into prompt tokens."""

    def __call__(self, task: Task, tokenizer: Any) -> list[int]: ...


class Explorer:
    """Rolls out one group of completions per task."""

    def __init__(self, engine: RolloutEngine, judge: Judge, tokenizer: Any) -> None:
        self._engine = engine
        self._judge = judge
        self._tokenizer = tokenizer

    async def rollout(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, group: str) -> list[Experience]:
        """n judged experiences of one task, ordered by index.

        Args:
            seed: what the completions' randomness derives from, besides their index.
            group: id of the group of experiences that are compared with each other.

        Raises:
            EngineError: the prompt does not fit.
            RewardError: a reward raised or returned something that is not a reward.
        """
        prompt_ids = encode_prompt(task, self._tokenizer)
        request = Request(prompt_ids, sampling, n=n, seed=seed, id=f"task {task.id}")
        judging: dict[int, asyncio.Task[Experience]] = {}
        try:
            async for completion in self._engine.stream(request):
                work = self._judged(task, completion, sampling, group)
                judging[completion.index] = asyncio.ensure_future(work)
            return list(await asyncio.gather(*(judging[index] for index in sorted(judging))))
        except BaseException:
            for pending in judging.values():
                pending.cancel()
            await asyncio.gather(*judging.values(), return_exceptions=True)
            raise

    async def _judged(self, task: Task, completion: Completion, sampling: SamplingConfig, group: str) -> Experience:
        experience = experience_from_completion(
            completion,
            id=f"{group}/{completion.index}",
            task_id=task.id,
            group=group,
            prompt=prompt_text(task, self._tokenizer),
            temperature=sampling.temperature or 1.0,
        )
        started = time.perf_counter()
        judgement = await self._judge.judge(task, completion)
        experience.reward = judgement.reward
        experience.reward_parts = dict(judgement.parts)
        experience.info["outcomes"] = dict(judgement.outcomes)
        experience.timings["reward"] = time.perf_counter() - started
        return experience
