"""The one pacing rule: synchronous, one-step-off and asynchronous runs differ in one number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Admission of rollouts (AReaL, arXiv:2505.24298): one may start only if
    floor(submitted / batch) <= version + max_staleness.

    What counts as submitted is what has a place in a step: groups that were learned from or may still be. Those that
    the pipeline dropped have none, and groups that others have put into the buffer have one.
    """

    batch: int  #: groups per training step
    max_staleness: int
    steps: int  #: training steps of the stage

    def step_of(self, done: int, ahead: int) -> int:
        """The step (of the stage, from 0) that the next group is for.

        Args:
            done: training steps of the stage that are over: the `version` of the rule.
            ahead: groups that come before it in the next steps.
        """
        return done + ahead // self.batch

    def may_start(self, done: int, ahead: int) -> bool:
        """Whether one more rollout may start now."""
        return self.step_of(done, ahead) < min(done + self.max_staleness + 1, self.steps)
