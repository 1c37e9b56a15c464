"""Rolls out tasks: a group of rollouts per task, each with rewards computed as soon as it ends.

An explorer has an engine, rewards, a tokenizer and perhaps a workflow; it does not know the trainer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollmill.concurrency import gather_or_cancel
from rollmill.config.rollout import SamplingConfig
from rollmill.data import encode_pictures, encode_prompt, parse_completion, render_prompt
from rollmill.data.images import image_refs_of
from rollmill.engines.base import CompletionPrefix, GenerationRequest, RolloutEngine
from rollmill.rewards import RewardResult
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.base import OnGenerated, PartialRollout
from rollmill.rollout.draft_cache import DraftCache, draft_from_completion
from rollmill.rollout.runner import WorkflowRunner, apply_repetition_penalty, assign_reward, trace_reward_result
from rollmill.seeds import derive_seed
from rollmill.trackers.trace import GENERATE, Trace
from rollmill.types import Completion, Experience, StopReason, Task, drafted_tokens, experience_from_completion


def completion_prefix(experience: Experience) -> CompletionPrefix:
    """Build the prefix that continues an experience with one turn of the policy: its tokens and their log-probs."""
    mine, drafted = experience.action_mask, drafted_tokens(experience)
    logprobs = experience.logprobs[mine]  # untruncated already, so kept_logmass is 0
    return CompletionPrefix(
        experience.token_ids[mine],
        logprobs,
        np.zeros_like(logprobs),
        experience.versions[mine],
        routing=experience.routing,
        drafted=None if drafted is None else drafted[mine],
    )


def add_earlier_timings(experiences: Sequence[Experience], earlier: Sequence[Experience]) -> list[Experience]:
    """Add the seconds of earlier parts to the experiences; both in the same order."""
    added = []
    for one, before in zip(experiences, earlier, strict=True):
        names = dict.fromkeys([*one.timings, *before.timings])
        timings = {name: one.timings.get(name, 0.0) + before.timings.get(name, 0.0) for name in names}
        added.append(replace(one, timings=timings))
    return added


class Explorer:
    """Rolls out one group per task. `trace` records when each completion was generated and scored.

    Args:
        runners: run the workflow of a rollout, by domain ("" without domains); a rollout of a task without one is one
            completion of its prompt.
        drafts: cache of completions, used as drafts when their task is rolled out again.
        task_runner: builds the runner of a task that names its workflow; called once per domain and workflow.
    """

    is_remote = False

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: StageRewards,
        tokenizer: Any,
        trace: Trace | None = None,
        runners: Mapping[str, WorkflowRunner] | None = None,
        drafts: DraftCache | None = None,
        task_runner: Callable[[Task], WorkflowRunner | None] | None = None,
    ) -> None:
        self._task_runner = task_runner
        self._task_runners: dict[tuple[str, str], WorkflowRunner | None] = {}
        self._engine = engine
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._trace = trace
        self._runners = dict(runners or {})
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
        """Return the experiences of n rollouts of one task, with rewards, ordered by index; a rollout has any number.

        Args:
            seed: seed of the rollouts, together with their index.
            group: id of the group of experiences that are compared with each other.
            with_greedy: each experience has the reward of the task's greedy rollout, `greedy_reward`.
                `generated` is called once that has its tokens, too: both are by the same weights.

        Raises:
            EngineError: the prompt does not fit.
            RewardError: a reward raised, or returned an invalid value.
            WorkflowError: the workflow did.
        """
        if not with_greedy:
            return await self._group(task, sampling, n, seed, group, generated)
        greedy = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
        arrived: dict[bool, list[Experience]] = {}  # keyed by `is_greedy`

        def on_generated(experiences: list[Experience], *, is_greedy: bool) -> None:
            arrived[is_greedy] = experiences
            if len(arrived) == 2 and generated is not None:
                generated(arrived[False])

        sampled = partial(on_generated, is_greedy=False)
        alone = partial(on_generated, is_greedy=True)
        experiences, baseline = await gather_or_cancel(
            [
                self._group(task, sampling, n, seed, group, sampled),
                self._group(task, greedy, 1, seed, f"{group}/greedy", alone, reuse=False),
            ]
        )
        for experience in experiences:
            experience.greedy_reward = baseline[0].reward if baseline else None
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
        """Roll out one group. With `reuse`, it uses and replaces the task's cached drafts."""
        runner = self._runner(task)
        if runner is not None:
            return await runner.group(task, sampling, n=n, seed=seed, group=group)
        cache = self._drafts if reuse else None
        drafts, slot = ((), None) if cache is None else cache.take(task.id, n)
        top = 0 if cache is None else cache.top
        request = self._request(task, sampling, n=n, seed=seed, drafts=drafts, record_top=top)
        completions: dict[int, Completion] = {}
        pending: dict[int, asyncio.Task[RewardResult]] = {}
        try:
            async for completion in self._engine.stream(request):
                completion.reply = parse_completion(task, self._tokenizer, completion)
                completions[completion.index] = completion
                if slot is not None:
                    slot[completion.index] = draft_from_completion(completion)
                work = self._rewards.score(task, completion, group_follows=True)
                pending[completion.index] = asyncio.ensure_future(work)
                self._record_timing(completion)
            ordered = [completions[index] for index in sorted(completions)]
            experiences = self._experiences(task, ordered, sampling, group)
            if generated is not None:
                generated(experiences)
            results = await asyncio.gather(*(pending[each.index] for each in ordered))
            self._add(experiences, await self._rewards.add_group_rewards(task, ordered, results), sampling)
            return experiences
        except BaseException:
            for work_left in pending.values():
                work_left.cancel()
            await asyncio.gather(*pending.values(), return_exceptions=True)
            raise

    def _runner(self, task: Task) -> WorkflowRunner | None:
        """Return the runner of a task's workflow; None if a rollout is one completion."""
        if task.workflow is None or self._task_runner is None:
            return self._runners.get("") or self._runners.get(task.taskset)
        key = task.taskset, task.workflow
        if key not in self._task_runners:
            self._task_runners[key] = self._task_runner(task)
        return self._task_runners[key]

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
        """Rewards are not computed. Raises EngineError if the prompt does not fit."""
        prefixes = [completion_prefix(each) for each in begun]
        request = self._request(task, sampling, n=n, seed=seed, prefixes=prefixes, counted=True)
        completions = await self._engine.generate(request)
        for completion in completions:
            completion.reply = parse_completion(task, self._tokenizer, completion)
            self._record_timing(completion)
        experiences = self._experiences(task, completions, sampling, group)
        return PartialRollout(add_earlier_timings(experiences, begun) if begun else experiences, completions)

    def prompt_only(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, group: str) -> list[Experience]:
        """Build the experiences of a group that was interrupted before it began: the prompt alone."""
        prompt = np.asarray(encode_prompt(task, self._tokenizer), np.int32)
        ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
        completions = [
            Completion(prompt, ids, numbers, ids, numbers, "", StopReason.ABORTED, derive_seed(seed, index), index)
            for index in range(n)
        ]
        return self._experiences(task, completions, sampling, group)

    async def score_part(self, task: Task, sampling: SamplingConfig, part: PartialRollout) -> None:
        """Set the rewards of a part whose completions have all ended. Raises RewardError, as `rollout` does."""
        self._add(part.experiences, await self._rewards.score_group(task, part.completions), sampling)

    def take_counts(self) -> dict[str, float]:
        """Counts of workflow rollouts since the last call, see RetryingWorkflow. Empty without a workflow."""
        total: Counter[str] = Counter()
        for runner in (*self._runners.values(), *self._task_runners.values()):
            total.update({} if runner is None else runner.take_counts())
        return dict(total)

    def _request(self, task: Task, sampling: SamplingConfig, *, n: int, seed: int, **more: Any) -> GenerationRequest:
        pictures = encode_pictures(task, self._tokenizer)
        ids = encode_prompt(task, self._tokenizer) if pictures is None else pictures.token_ids
        return GenerationRequest(ids, sampling, n=n, seed=seed, id=f"task {task.id}", pictures=pictures, **more)

    def _experiences(
        self, task: Task, completions: Sequence[Completion], sampling: SamplingConfig, group: str
    ) -> list[Experience]:
        prompt, temperature = render_prompt(task, self._tokenizer), sampling.temperature or 1.0
        experiences = [
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
        for each in experiences if image_refs_of(task.metadata) else ():
            each.info["images"] = task.metadata["images"]
        return experiences

    def _record_timing(self, completion: Completion) -> None:
        if self._trace is not None:
            self._trace.add(GENERATE, completion.submitted_at, completion.started_at, completion.finished_at)

    def _add(
        self, experiences: Sequence[Experience], results: Sequence[RewardResult], sampling: SamplingConfig
    ) -> None:
        """Set the experiences' rewards, less the repetition penalty."""
        for experience, result in zip(experiences, results, strict=True):
            assign_reward(experience, result)
            trace_reward_result(self._trace, result)
            apply_repetition_penalty([experience], sampling, experience.stop_reason is StopReason.REPETITION)
