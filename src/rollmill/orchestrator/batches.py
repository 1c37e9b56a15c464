"""What a training step learns from, where it is made in the same process: rollouts, verified, until a batch is there.

    sampler -> explorer -> queue -> pipeline -> store -> batch

For every group of which the pipeline leaves nothing, another task is rolled out, so a batch is never short.
"""

from __future__ import annotations

from typing import Protocol

from rollmill.buffer.ratings import RatingOverrides
from rollmill.config.run import StageConfig
from rollmill.orchestrator.batch_reader import BatchReader
from rollmill.orchestrator.producer import RolloutComponents, RolloutProducer
from rollmill.orchestrator.scheduler import accepted
from rollmill.orchestrator.state import StageState
from rollmill.types import Experience


class BatchSource(Protocol):
    """Where a stage's experiences come from."""

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """Start what the pacing rule admits while weights are at `version`, and wait for its tokens.

        Args:
            deadlines: how many times rollout.deadline_s they may take.
        """

    def again(self, version: int) -> list[Experience]:
        """See BatchReader."""

    def known(self) -> list[Experience] | None:
        """What `collect` will give, judged or not; None where some tokens, or the pipeline's verdict, are missing."""

    async def collect(self, version: int) -> list[Experience]:
        """The verified experiences of one batch of groups, once they are judged.

        Raises:
            PipelineError: operators leave nothing of too many groups; names those that dropped most.
            DeadlineError: they do not come.
        """
        ...

    def upcoming(self) -> list[list[Experience]]:
        """Completions of later steps whose tokens are there, judged or not, batch by batch."""
        ...

    def learned(self, version: int) -> None:
        """See BatchReader."""

    def metrics(self) -> dict[str, float]:
        """What was done since the last call."""
        ...

    def mark(self, state: StageState) -> None:
        """Note a step boundary in the stage's state."""

    async def snapshot(self, state: StageState) -> None:
        """Put the groups of the last boundary into the state; waits for rewards of rollouts that have finished."""

    def restore(self, state: StageState) -> None:
        """Go on from a checkpoint."""

    async def close(self) -> None:
        """Stop what is under way."""


class RolloutBatches(RolloutProducer):
    """The rollouts of one stage, from tasks to batches; see Supplies.

    Args:
        first_version: of the weights when the stage began.
        seed: what replay derives from.
    """

    def __init__(
        self, config: StageConfig, line: RolloutComponents, ratings: RatingOverrides, *, first_version: int, seed: int
    ) -> None:
        super().__init__(config, line)
        self._first_version = first_version
        self._consumption = BatchReader(config, line.store, ratings, first_version=first_version, seed=seed)

    async def roll_out(self, version: int, deadlines: int = 1) -> None:
        """See BatchSource."""
        await self._rollouts.run(version, self._waiting(version), deadlines)

    def again(self, version: int) -> list[Experience]:
        """See BatchReader."""
        return self._consumption.again(version)

    def known(self) -> list[Experience] | None:
        """See BatchSource."""
        if len(self._pipeline) or self._store.waiting():
            return None
        groups = self._queue.peek(self._config.rollout.batch)
        if groups is None or len(groups) < self._config.rollout.batch:
            return None
        left = [accepted(group) for group in groups]
        return [each for group in left for each in group] if all(left) else None

    async def collect(self, version: int) -> list[Experience]:
        """See BatchSource."""
        wasted = 0
        while (missing := self._config.rollout.batch - self._waiting(version)) > 0:
            if not self._rollouts.ready(missing):
                with self._trace.record_span("rollout", f"completions of {missing} groups"):
                    await self.roll_out(version)
            with self._trace.record_span("reward", f"rewards of {missing} groups"):
                wasted += await self._verify_oldest(missing, version)
            self._require_some(wasted)
        experiences = self._consumption.take(version, self._oldest(version))
        self._rollouts.end_step()
        return experiences

    def upcoming(self) -> list[list[Experience]]:
        """See BatchSource; what the pipeline may still drop included."""
        groups = [accepted(group.known) for group in self._queue.all() if group.known]
        size = self._config.rollout.batch
        return [[each for group in groups[i : i + size] for each in group] for i in range(0, len(groups), size)]

    def _waiting(self, version: int) -> int:
        return self._store.waiting(min_version=self._oldest(version))

    def _oldest(self, version: int) -> int | None:
        age = self._config.buffer.max_age
        return None if age is None else version - age

    def learned(self, version: int) -> None:
        """See BatchReader."""
        self._consumption.learned(version)

    def metrics(self) -> dict[str, float]:
        """What rollouts and pipeline did since the last call, what the sampler knows, and what joined again."""
        return super().metrics() | self._consumption.metrics()
