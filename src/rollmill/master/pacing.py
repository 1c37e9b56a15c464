"""The one pacing rule: synchronous, one-step-off and asynchronous runs differ in one number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pacing:
    """Admission of rollouts (AReaL, arXiv:2505.24298): one may start only if
    floor(submitted / batch) <= version + max_staleness.

    `batch` counts tasks per training step; `version` the trainer's steps of this stage.
    """

    batch: int
    max_staleness: int
    total: int  #: tasks the stage needs at all
    submitted: int = 0
    given: int = 0  #: groups that came from elsewhere (imports) and are learned from like submitted ones
    dropped: int = 0  #: submitted tasks of which the pipeline left nothing: others are submitted in their place

    @property
    def live(self) -> int:
        """Groups that were, are or will be learned from."""
        return self.submitted - self.dropped + self.given

    def may_start(self, version: int) -> bool:
        """Whether one more rollout may start now."""
        return self.live < self.total and self.live // self.batch <= version + self.max_staleness
