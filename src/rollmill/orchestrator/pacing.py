"""The pacing rule, which makes runs synchronous, one-step-off or asynchronous by one number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Admits rollouts (AReaL, arXiv:2505.24298), by floor(submitted / batch) <= version + steps_ahead.

    `submitted` counts all groups since the start of the stage, `ahead` below only those that no finished step has used:
    submitted = done * batch + ahead, and `version` is `done`. Groups count as submitted if they have a place in a step:
    those that were trained on or may still be. Groups that the pipeline dropped do not count; groups that other
    processes put into the buffer do.
    """

    batch: int  #: groups per training step
    steps_ahead: int  #: `max_staleness`, less the steps that publish no weights (`StageConfig.steps_ahead`)
    steps: int  #: training steps of the stage

    def step_of(self, done: int, ahead: int) -> int:
        """The step (of the stage, from 0) that the next group is for.

        Args:
            done: finished training steps of the stage: the `version` of the rule.
            ahead: groups before it in the next steps.
        """
        return done + ahead // self.batch

    def may_start(self, done: int, ahead: int) -> bool:
        """True if one more group may start now."""
        return self.step_of(done, ahead) < min(done + self.steps_ahead + 1, self.steps)
