"""Schedules the rollouts of one stage: which task starts when, and which completions are interrupted or stopped.

    sampler -> explorer -> queue

A step's rollouts end by one of three rules: all started groups have their tokens; with `rollout.oversample`, as many
groups as needed have them; with `rollout.token_budget`, the step's groups have them and that many tokens were
generated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from rollmill.buffer import ExperienceStore, GroupQueue
from rollmill.buffer.base import oldest_version
from rollmill.buffer.group_queue import PendingGroup
from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import DeadlineError
from rollmill.orchestrator.domain_pauses import pause_on_loss
from rollmill.orchestrator.oversampling import MAX_STOPS, LengthBias, StoppedTasks
from rollmill.orchestrator.pacing import Pacing
from rollmill.orchestrator.partial_rollouts import (
    SEGMENTS,
    PartialRollouts,
    count_unfinished,
    response_tokens,
    trainable_part,
)
from rollmill.orchestrator.state import StageState
from rollmill.rollout.base import ExplorerProtocol
from rollmill.seeds import derive_seed
from rollmill.trackers.rollout_log import decode_experience, encode_experience
from rollmill.types import Experience, Task
from rollmill.waiting import OUTAGES, patient_timeout

Result = TypeVar("Result")

_POLL_S = 0.25
_WAITING_FOR = {True: "explorers to finish their rollouts", False: "the engine to finish its completions"}  # is_remote


class InterruptibleEngine(Protocol):
    """Counts the tokens that it generates, and can be interrupted: an engine, or all engines of remote explorers."""

    @property
    def tokens_generated(self) -> int:
        """Tokens generated so far."""
        ...

    def interrupt(self) -> None:
        """Stop all requests: unfinished completions are returned as they are."""

    async def wait_for_tokens(self) -> None:
        """Wait until more tokens may have been sampled."""


class RolloutScheduler:
    """Starts groups of completions from tasks and tracks them until their tokens are generated.

    Args:
        task: returns a task by id.
        first_version, seed: version of the weights at the start of the stage; completions' seeds derive from `seed`.
    """

    def __init__(
        self,
        config: StageConfig,
        *,
        sampler: Sampler,
        explorer: ExplorerProtocol,
        engine: InterruptibleEngine,
        store: ExperienceStore,
        task: Callable[[str], Task],
        first_version: int,
        seed: int,
    ) -> None:
        self._config, self._rollout, self._task = config, config.rollout, task
        self._first_version, self._seed, self._views = first_version, seed, config.by_domain()
        self._sampler, self._explorer, self._engine = sampler, explorer, engine
        self._pacing = Pacing(config.rollout.batch, config.steps_ahead, config.steps)
        self._submitted = 0
        self._unfinished: list[tuple[int, str]] = []  # to start again before anything else
        self._stopped = StoppedTasks(config.rollout.oversample)
        self._partials = PartialRollouts(store, config.name)
        self._interrupted: dict[int, list[Experience]] = {}  # partial groups by number
        self._step, self._budget_ends = -1, 0
        self._counted: Counter[str] = Counter()
        self._lengths = LengthBias()
        self._at_boundary: list[PendingGroup] = []
        self._unfinished_at_boundary: list[tuple[int, str]] = []
        self.queue = GroupQueue()

    async def run(self, version: int, waiting: Callable[[], int], deadlines: int = 1) -> None:
        """Start the rollouts that the pacing rule admits at weights `version`, and wait for their tokens.

        Args:
            waiting: counts the groups in the buffer that wait for a step.
            deadlines: how many times rollout.deadline_s it may take.

        Raises:
            DeadlineError: it takes too long.
            RollmillError: a rollout failed.
        """
        self._begin_step(version)
        before, done = self._engine.tokens_generated, version - self._first_version
        ahead = waiting() + len(self.queue)
        started = self._admit(done, ahead)
        admitted = len(started)
        for _ in range(self._stopped.extra(admitted)):
            started.append(self._start_next(self._pacing.step_of(done, ahead + admitted - 1)))
        await asyncio.sleep(0)  # lets the requests reach the engine
        if self._rollout.token_budget is not None:
            work = self._until_spent(max(self._rollout.batch - waiting(), 0))
        elif len(started) > admitted:
            work = self._until_admitted(started, admitted, before)
        elif self._explorer.is_remote:
            work = self._until_enough(waiting)  # others run on while this process trains
        else:
            work = self.queue.wait_all_generated()
        deadline = deadlines * self._rollout.deadline_s
        await _wait_with_deadline(work, deadline, "the orchestrator", _WAITING_FOR[self._explorer.is_remote])
        self.queue.raise_failure()

    def ready(self, count: int) -> bool:
        """True if a step can take groups: there are some, and none of the `count` oldest was interrupted."""
        taken = self.queue.first(count)
        return bool(taken) and all(number > taken[-1].number for number in self._interrupted)

    def _begin_step(self, version: int) -> None:
        """Continue interrupted groups: of earlier steps or, when a step is repeated, of the same one."""
        continued, is_new = self._interrupted, version != self._step
        if is_new and self._rollout.token_budget is not None:
            continued = self._partials.take(step=version + 1)
            self._budget_ends = self._engine.tokens_generated + self._rollout.token_budget
        self._step, self._interrupted = version, {}
        for number in sorted(continued):  # other processes return groups in any order
            begun = continued[number]
            oldest = oldest_version(begun)
            if 0 <= oldest < version - self._config.max_staleness:
                begun = []  # other groups entered the buffer first: its tokens are too old
                self._counted["partial/late"] += 1
            self._counted["continued"] += count_unfinished(begun) if is_new else 0
            self._start(number, self._task(continued[number][0].task_id), begun)

    # -- starting ----------------------------------------------------------------------------------------------

    def _admit(self, done: int, ahead: int) -> list[_StartedGroup]:
        """Start the rollouts that the pacing rule admits, and all that were under way at the checkpoint."""
        started: list[_StartedGroup] = []
        while self._unfinished or self._pacing.may_start(done, ahead + len(started)):  # imports take places, not turns
            started.append(self._start_next(self._pacing.step_of(done, ahead + len(started))))
        return started

    def _start_next(self, step: int) -> _StartedGroup:
        """Start the next task, for a step of the stage."""
        if self._unfinished:
            number, id = self._unfinished.pop(0)
            self._start(number, self._task(id))
            return _StartedGroup(number, self._task(id), 0)
        number, self._submitted = self._submitted, self._submitted + 1
        task, times = self._stopped.next() or (self._sampler.next(step), 0)
        self._start(number, task)
        return _StartedGroup(number, task, times)

    def _start(self, number: int, task: Task, begun: Sequence[Experience] = ()) -> None:
        view, seed = self._views[self._config.domain_of(task.id)], derive_seed(self._seed, number)
        sampling, group = view.rollout, f"{self._config.name}-{number:06d}"
        if sampling.token_budget is not None:
            work = self._in_parts(number, task, group, seed, begun)
        else:

            def generated(experiences: list[Experience]) -> None:
                self.queue.generated(number, experiences)

            roll = partial(self._explorer.rollout, with_greedy=view.uses_greedy)
            work = roll(task, sampling, n=sampling.group_size, seed=seed, group=group, generated=generated)
        if self._config.domains:
            work = pause_on_loss(task.taskset, work, view, self._sampler, self._config.mixing.lost_after_s)
        self.queue.put(number, f"task {task.id}", asyncio.ensure_future(work), task=task.id)

    async def _in_parts(
        self, number: int, task: Task, group: str, seed: int, begun: Sequence[Experience]
    ) -> list[Experience]:
        """Return a group's experiences with rewards; an interrupted group leaves the queue and is kept for later."""
        sampling = self._views[self._config.domain_of(task.id)].rollout
        part = await self._explorer.part(task, sampling, n=sampling.group_size, seed=seed, group=group, begun=begun)
        if count_unfinished(part.experiences):
            self._interrupted[number] = part.experiences
            self.queue.withdraw(number)
            return []
        newest = sampling.partial.learn == "newest"
        part.experiences = [trainable_part(each, newest=newest) for each in part.experiences]
        self._counted["whole"] += len(part.experiences)
        self._counted["segments"] += sum(each.info[SEGMENTS] for each in part.experiences)
        self.queue.generated(number, part.experiences)
        await self._explorer.score_part(task, sampling, part)
        return part.experiences

    # -- ending ------------------------------------------------------------------------------------------------

    async def _until_spent(self, needed: int) -> None:
        """Wait until the oldest `needed` groups are finished and the budget is spent, or nothing is left; then
        interrupt."""

        def enough() -> bool:
            spent = self._engine.tokens_generated >= self._budget_ends
            return self.queue.all_have_tokens(needed if spent else None)

        while not (enough() or self.queue.failed()):
            await self._engine.wait_for_tokens()
        await _interrupt(self._engine, self.queue)
        groups = [group.experiences or [] for group in self.queue.all()]
        taken, everything = groups[:needed], [*groups, *self._interrupted.values()]
        self._lengths = LengthBias()
        self._lengths.add(*_count_tokens(taken), *_count_tokens(everything))

    async def _until_enough(self, waiting: Callable[[], int]) -> None:
        """Wait until a step's groups are finished, or in the buffer: other processes may put groups there."""
        while not (self.queue.failed() or self.queue.all_have_tokens(max(self._rollout.batch - waiting(), 0))):
            await self.queue.wait_for_news(_POLL_S)

    async def _until_admitted(self, started: Sequence[_StartedGroup], admitted: int, before: int) -> None:
        """Wait until as many groups have their tokens as the pacing rule admits; then stop the others.

        Rejected groups do not count: they leave nothing to train on, and end early on failures.
        """
        numbers = [each.number for each in started]
        overdue = sorted((each for each in started if each.stopped >= MAX_STOPS), key=lambda each: -each.stopped)
        needed = [each.number for each in overdue[:admitted]]
        chosen = await self.queue.wait_first_generated(numbers, admitted, needed=needed, counts=_is_useful)
        if self.queue.failed():
            return
        empty = self.queue.there(numbers, lambda group: not _is_useful(group))
        others = [each for each in started if each.number not in (*chosen, *empty)]
        taken = sum(each.action_tokens for number in chosen for each in self.queue.tokens_of(number))
        await self.queue.drop([each.number for each in others])
        if self._explorer.is_remote:
            await self._engine.wait_for_tokens()  # counts those of dropped groups
        for each in others:
            self._stopped.add(each.task, each.stopped)
        tokens, size = self._engine.tokens_generated - before, self._rollout.group_size
        self._counted["stopped"] += len(others)
        self._counted["wasted_tokens"] += tokens - taken
        self._lengths.add(taken, len(chosen) * size, tokens, len(started) * size)

    def end_step(self) -> None:
        """Store unfinished groups in the buffer, once the step has taken its groups."""
        self._partials.put(self._interrupted, self._step)
        self._counted["partial"] += sum(count_unfinished(each) for each in self._interrupted.values())
        self._interrupted = {}

    def metrics(self) -> dict[str, float]:
        """Metrics of rollouts since the last call."""
        counted, self._counted = self._counted, Counter()
        lengths, self._lengths = self._lengths, LengthBias()
        found = self._explorer.take_counts()
        if self._rollout.oversample:
            found |= {key: float(counted[key]) for key in ("stopped", "wasted_tokens")}
        if self._rollout.token_budget is not None:
            found |= {key: float(counted[key]) for key in ("continued", "partial", "partial/late")}
        if counted["whole"]:
            found["segments"] = counted["segments"] / counted["whole"]
        if lengths.bias is not None:
            found["length_bias"] = lengths.bias
        return {f"rollout/{key}": value for key, value in found.items()}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def mark(self, state: StageState) -> None:
        """Record a step boundary in the stage's state."""
        state.submitted, state.again = self._submitted, self._stopped.state()
        state.tasks = self._sampler.state_dict()
        self._at_boundary, self._unfinished_at_boundary = self.queue.all(), list(self._unfinished)

    async def snapshot(self, state: StageState) -> None:
        """Store the groups of the last boundary in the state; waits for rewards of finished rollouts.

        A resumed run rolls out again what other processes have not finished, or what waits for an endpoint.
        """
        waiting, running = self._at_boundary, self._unfinished_at_boundary
        if self._explorer.is_remote or OUTAGES.current():
            waiting = [group for group in waiting if group.future.done() and not group.failed]
            running = [*running, *((group.number, group.task) for group in self._at_boundary if group not in waiting)]
        state.unfinished = sorted(running)
        rewards = asyncio.gather(*(group.future for group in waiting))
        await _wait_with_deadline(
            rewards, self._rollout.deadline_s, "the checkpoint", f"the rewards of {len(waiting)} groups"
        )
        state.groups = [[encode_experience(each, routing=True) for each in group.future.result()] for group in waiting]
        state.numbers = [group.number for group in waiting]

    def restore(self, state: StageState) -> None:
        self._submitted = state.submitted
        self._stopped.restore([(self._task(id), times) for id, times in state.again])
        self._unfinished = [(number, task) for number, task in state.unfinished]
        assert state.tasks is not None, "a stage with rollouts stores its sampler"
        self._sampler.load_state_dict(state.tasks)
        groups = [[decode_experience(row) for row in group] for group in state.groups]
        self.queue.restore(dict(zip(state.numbers, groups, strict=True)))

    async def close(self) -> None:
        await self.queue.cancel()


class _StartedGroup(NamedTuple):
    number: int
    task: Task
    stopped: int  # earlier stops of the task


def accepted(group: Sequence[Experience]) -> list[Experience]:
    """The experiences of a group, without rejected rollouts."""
    return [each for each in group if each.rejected is None]


async def _interrupt(engine: InterruptibleEngine, queue: GroupQueue) -> None:
    """Interrupt all groups that are still generated, and wait until they have left the queue.

    It is repeated for what had not reached an engine in another process when that was interrupted.
    """
    engine.interrupt()
    while not (queue.all_have_tokens() or queue.failed()):
        await queue.wait_for_news(_POLL_S)
        engine.interrupt()


def _is_useful(group: Sequence[Experience]) -> bool:
    return bool(accepted(group))


def _count_tokens(groups: Sequence[Sequence[Experience]]) -> tuple[int, int]:
    """Tokens and completions of groups."""
    return sum(map(response_tokens, groups)), sum(map(len, groups))


async def _wait_with_deadline(work: Awaitable[Result], seconds: float, waiter: str, owner: str) -> Result:
    """Return the result of `work`. Raises DeadlineError after `seconds`, naming the waiter and the work's owner."""
    try:
        async with patient_timeout(seconds):
            return await work
    except TimeoutError:
        advice = "Raise rollout.deadline_s or lower rollout.max_new_tokens, rollout.batch or rollout.group_size."
        raise DeadlineError(waiter, owner, seconds, advice) from None
