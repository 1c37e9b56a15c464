"""Rolls out tasks: a group of rollouts per task, each judged the moment it ends.

An explorer knows an engine, a judge, a tokenizer and perhaps a workflow; it does not know who trains or who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rollmill.config.rollout import SamplingConfig
from rollmill.data import encode_prompt, render_prompt
from rollmill.engines.base import CompletionPrefix, GenerationRequest, RolloutEngine
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.function_threads import gather_or_cancel
from rollmill.rollout.base import OnGenerated
from rollmill.rollout.draft_cache import DraftCache, draft_from_completion
from rollmill.rollout.runner import WorkflowRunner, apply_repetition_penalty, assign_reward, trace_reward_result
from rollmill.trackers.trace import GENERATE, Trace
from rollmill.types import Completion, Experience, StopReason, Task, experience_from_completion

# Completions that are generated in parts: put away when the engine is interrupted, and continued later.


@dataclass(slots=True)
class PartialRollout:
    """Completions of a group and the experiences made of them, in the same order."""

    completions: list[Completion]
    experiences: list[Experience]


def completion_prefix(experience: Experience) -> CompletionPrefix:
    """What a completion goes on from: the tokens of an experience with one turn of the policy, with their log-probs."""
    mine = experience.action_mask
    logprobs = experience.logprobs[mine]  # truncation is in them already, so that its part is 0
    return CompletionPrefix(
        experience.token_ids[mine],
        logprobs,
        np.zeros_like(logprobs),
        experience.versions[mine],
        routing=experience.routing,
    )


def add_earlier_timings(experiences: Sequence[Experience], earlier: Sequence[Experience]) -> list[Experience]:
    """The experiences, with the seconds that earlier parts took added; both in the same order."""
    added = []
    for one, before in zip(experiences, earlier, strict=True):
        names = dict.fromkeys([*one.timings, *before.timings])
        timings = {name: one.timings.get(name, 0.0) + before.timings.get(name, 0.0) for name in names}
        added.append(replace(one, timings=timings))
    return added


class Explorer:
    """Rolls out one group per task. `trace` is told when each completion was generated and judged.

    Args:
        runner: runs the workflow of a rollout; None: a rollout is one completion of the task's prompt.
        drafts: where completions are kept for the next time that their task is rolled out.
    """

    elsewhere = False

    def __init__(
        self,
        engine: RolloutEngine,
        judge: RewardManager,
        tokenizer: Any,
        trace: Trace | None = None,
        runner: WorkflowRunner | None = None,
        drafts: DraftCache | None = None,
    ) -> None:
        self._engine = engine
        self._judge = judge
        self._tokenizer = tokenizer
        self._trace = trace
        self._runner = runner
        self._drafts = drafts

    async def rollout(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None = None,
        with_greedy: bool = False,
    ) -> list[Experience]:
        """The judged experiences of n rollouts of one task, ordered by index; a rollout may give several, or none.

        Args:
            seed: what the rollouts' randomness derives from, besides their index.
            group: id of the group of experiences that are compared with each other.
            with_greedy: each experience's info has the reward of the task's greedy rollout, `greedy_reward`.
                `generated` is called when that has its tokens, too: both are of the same weights.

        Raises:
            EngineError: the prompt does not fit.
            RewardError: a reward raised or returned something that is not a reward.
            WorkflowError: the workflow did.
        """
        if not with_greedy:
            return await self._group(task, sampling, n, seed, group, generated)
        greedy = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
        arrived: dict[bool, list[Experience]] = {}  # by whether they are the greedy one

        def told(own: list[Experience], *, is_greedy: bool) -> None:
            arrived[is_greedy] = own
            if len(arrived) == 2 and generated is not None:
                generated(arrived[False])

        sampled = partial(told, is_greedy=False)
        alone = partial(told, is_greedy=True)
        experiences, baseline = await gather_or_cancel(
            [
                self._group(task, sampling, n, seed, group, sampled),
                self._group(task, greedy, 1, seed, f"{group}/greedy", alone, reuse=False),
            ]
        )
        for experience in experiences:
            experience.info["greedy_reward"] = baseline[0].reward if baseline else None
        return experiences

    async def _group(
        self,
        task: Task,
        sampling: SamplingConfig,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None,
        *,
        reuse: bool = True,
    ) -> list[Experience]:
        """One group. With `reuse` it begins with the task's drafts, where drafts are kept, and leaves its own."""
        if self._runner is not None:
            return await self._runner.group(task, sampling, n=n, seed=seed, group=group)
        shelf = self._drafts if reuse else None
        drafts, slot = ((), None) if shelf is None else shelf.take(task.id, n)
        top = 0 if shelf is None else shelf.top
        request = self._request(task, sampling, n=n, seed=seed, drafts=drafts, record_top=top)
        completions: dict[int, Completion] = {}
        judging: dict[int, asyncio.Task[RewardResult]] = {}
        try:
            async for completion in self._engine.stream(request):
                completions[completion.index] = completion
                if slot is not None:
                    slot[completion.index] = draft_from_completion(completion)
                work = self._judge.judge(task, completion, group_follows=True)
                judging[completion.index] = asyncio.ensure_future(work)
                self._tell(completion)
            ordered = [completions[index] for index in sorted(completions)]
            experiences = self._experiences(task, ordered, sampling, group)
            if generated is not None:
                generated(experiences)
            judgements = await asyncio.gather(*(judging[each.index] for each in ordered))
            self._add(experiences, await self._judge.add_group_rewards(task, ordered, judgements), sampling)
            return experiences
        except BaseException:
            for pending in judging.values():
                pending.cancel()
            await asyncio.gather(*judging.values(), return_exceptions=True)
            raise

    async def part(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        begun: Sequence[Experience] = (),
    ) -> PartialRollout:
        """n completions of a task, until they have ended or the engine is interrupted. They are not judged.

        Args:
            begun: what an earlier part of the same group has given.

        Raises EngineError where the prompt does not fit.
        """
        request = self._request(task, sampling, n=n, seed=seed, begun=[completion_prefix(each) for each in begun])
        completions = await self._engine.generate(request)
        for completion in completions:
            self._tell(completion)
        experiences = self._experiences(task, completions, sampling, group)
        return PartialRollout(completions, add_earlier_timings(experiences, begun) if begun else experiences)

    async def judge(self, task: Task, sampling: SamplingConfig, part: PartialRollout) -> None:
        """Write what the rewards say into the experiences of a part whose completions have all ended.

        Raises RewardError: see `rollout`.
        """
        self._add(part.experiences, await self._judge.judge_group(task, part.completions), sampling)

    def take_counts(self) -> dict[str, float]:
        """What has become of rollouts by a workflow since the last call: see Attempts. Empty where there is none."""
        return {} if self._runner is None else self._runner.take_counts()

    def _request(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, **more: Any) -> GenerationRequest:
        ids = encode_prompt(task, self._tokenizer)
        return GenerationRequest(ids, sampling, n=n, seed=seed, id=f"task {task.id}", **more)

    def _experiences(
        self, task: Task, completions: Sequence[Completion], sampling: SamplingConfig, group: str
    ) -> list[Experience]:
        prompt, temperature = render_prompt(task, self._tokenizer), sampling.temperature or 1.0
        return [
            experience_from_completion(
                each,
                id=f"{group}/{each.index}",
                task_id=task.id,
                group=group,
                prompt=prompt,
                temperature=temperature,
            )
            for each in completions
        ]

    def _tell(self, completion: Completion) -> None:
        if self._trace is not None:
            self._trace.add(GENERATE, completion.submitted_at, completion.started_at, completion.finished_at)

    def _add(
        self, experiences: Sequence[Experience], judgements: Sequence[RewardResult], sampling: SamplingConfig
    ) -> None:
        """Write into experiences what the rewards say of them, less what repetition costs."""
        for experience, judgement in zip(experiences, judgements, strict=True):
            assign_reward(experience, judgement)
            trace_reward_result(self._trace, judgement)
            apply_repetition_penalty([experience], sampling, experience.stop_reason is StopReason.REPETITION)
