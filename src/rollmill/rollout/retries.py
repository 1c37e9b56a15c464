"""Tries of one rollout: until one succeeds, or the last has failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from rollmill.config.rollout import RolloutConfig
from rollmill.errors import ContextLengthError, EpisodeError, RollmillError, WorkflowError
from rollmill.rollout.workflow import Rollout, RolloutResult, Workflow

FAILURE_TIMEOUT, FAILURE_ENVIRONMENT, FAILURE_CONTEXT, FAILURE_WORKFLOW = "late", "environment", "context", "workflow"
"""Why a try failed: its time was up, its environment, a prompt longer than the model's context, anything else."""


class RetryingWorkflow:
    """Runs rollouts as often as they may be tried, and counts.

    Failed is a try whose environment or workflow raised, or that took too long. What configuration, rewards and engines
    raise ends the run whatever the workflow is allowed.

    Args:
        needs_reward: what has none is of no use, so that a workflow which returns None rejects its rollout.
    """

    def __init__(self, workflow: Workflow, limits: RolloutConfig, *, needs_reward: bool = True) -> None:
        self._workflow, self._limits, self._needs_reward = workflow, limits, needs_reward
        self._counted: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Of the workflow."""
        return self._workflow.name

    async def run(self, begin: Callable[[int], Rollout]) -> tuple[Rollout, RolloutResult]:
        """The last try of a rollout, and what it is worth; `begin` makes a fresh one for try 0, 1, ...

        Raises:
            WorkflowError: all tries failed, and failures are to end the run; names task, rollout, file and line. Or the
                workflow returned something that is not a reward.
            RollmillError: configuration, a reward or an engine is at fault.
        """
        for number in range(self._limits.attempts):
            rollout = begin(number)
            self._counted["retries"] += number > 0
            try:
                answer = await self._in_time(rollout)
            except Exception as error:
                last = number + 1 == self._limits.attempts
                kind = self._failure(rollout, error)
                if not last:
                    continue
                if self._limits.failures == "stop":
                    self._stop(rollout, error)
                return rollout, self._rejected(RolloutResult(None, {}, rejected=kind))
            return rollout, self._rejected(self._valued(rollout, answer))
        raise AssertionError("there is at least one try")

    def take_counts(self) -> dict[str, float]:
        """Since the last call: retries; failed tries, and how many for which reason; rejected rollouts."""
        found, self._counted = self._counted, Counter()
        return {key: float(found[key]) for key in ("retries", "failed", "rejected", FAILURE_TIMEOUT, *sorted(found))}

    async def _in_time(self, rollout: Rollout) -> Any:
        """What the workflow returns. Raises TimeoutError past the limit; calls to the engine are aborted then."""
        try:
            async with asyncio.timeout(self._limits.time_limit_s) as limit:
                return await self._workflow.answer(rollout)
        except TimeoutError as error:
            if limit.expired():
                text = f"it took longer than rollout.time_limit_s ({self._limits.time_limit_s:g} s)"
                raise _RolloutTimeoutError(text) from error.__cause__
            raise

    def _failure(self, rollout: Rollout, error: Exception) -> str:
        """Why a try has failed, counted. Raises the error where it is none of the workflow."""
        for each in _flatten_errors(error):
            if isinstance(each, RollmillError) and not isinstance(each, WorkflowError | ContextLengthError):
                raise each
        kind = _kind(error)
        self._counted["failed"] += 1
        self._counted[kind if kind == FAILURE_TIMEOUT else f"failed/{kind}"] += 1
        return kind

    def _valued(self, rollout: Rollout, answer: Any) -> RolloutResult:
        try:
            outcome = self._workflow.outcome(rollout, answer)
        except (TypeError, ValueError) as error:
            raise WorkflowError(f"{self._who(rollout)}: {error}") from error
        return outcome if self._needs_reward else replace(outcome, rejected=None)

    def _rejected(self, outcome: RolloutResult) -> RolloutResult:
        self._counted["rejected"] += outcome.rejected is not None
        return outcome

    def _stop(self, rollout: Rollout, error: Exception) -> NoReturn:
        tries = f" ({self._limits.attempts} tries)" if self._limits.attempts > 1 else ""
        what = (
            str(error)
            if isinstance(error, RollmillError | _RolloutTimeoutError)
            else f"{type(error).__name__}: {error}"
        )
        raise WorkflowError(
            f"{self._who(rollout)}{tries}: {_failure_location(error.__cause__ or error)}{what}{_ADVICE}"
        ) from error

    def _who(self, rollout: Rollout) -> str:
        return f"workflow `{self._workflow.name}` failed on task `{rollout.task.id}`, rollout {rollout.index}"


class _RolloutTimeoutError(Exception):
    """A rollout took longer than its time limit."""


_ADVICE = ". Mend it, or set rollout.attempts or rollout.failures: reject"


def _kind(error: Exception) -> str:
    kinds: dict[type[Exception], str] = {
        _RolloutTimeoutError: FAILURE_TIMEOUT,
        EpisodeError: FAILURE_ENVIRONMENT,
        ContextLengthError: FAILURE_CONTEXT,
    }
    return next((kind for type_, kind in kinds.items() if isinstance(error, type_)), FAILURE_WORKFLOW)


def _flatten_errors(error: BaseException) -> list[BaseException]:
    """What task groups have gathered, one by one."""
    return (
        [leaf for each in error.exceptions for leaf in _flatten_errors(each)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


def _failure_location(error: BaseException) -> str:
    """FILE:LINE: of where the user's code failed: the last frame outside of rollmill and of libraries."""
    found, at = "", error.__traceback__
    while at is not None:
        file: Any = at.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/rollmill/" not in file.replace("\\", "/") and "lib/python" not in file:
            found = f"{file}:{at.tb_lineno}: "
        at = at.tb_next
    return found
