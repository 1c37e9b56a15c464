"""Phases of a step: when one begins, what it needs comes to the device, and its time is noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollmill.config.offload import Phase
from rollmill.offload import OffloadManager
from rollmill.trackers.trace import Trace

MOVE = "move"
_PHASES: dict[str, Phase] = {"rollout": "rollout", "eval": "rollout", "inference": "inference", "train": "train"}


class PhaseTrace(Trace):
    """A trace whose kinds of work are phases, too, where there is a residency. An evaluation needs what rollouts do.

    Args:
        says: is told the kind of what begins, and what it waits for.
    """

    def __init__(self, says: Callable[[str, str], None]) -> None:
        super().__init__()
        self._says = says
        self.offloader: OffloadManager | None = None

    @contextmanager
    def record_span(self, kind: str, waits_for: str = "") -> Iterator[None]:
        """See Trace. Raises OffloadError where what has to leave has no room."""
        self._says(kind, waits_for)
        if kind in _PHASES:
            self.enter(_PHASES[kind])
        with super().record_span(kind, waits_for):
            yield

    def enter(self, phase: Phase) -> None:
        """What the phase needs is on the device afterwards."""
        began = time.perf_counter()
        if self.offloader is not None and self.offloader.enter(phase):
            self.add(MOVE, began, began, time.perf_counter())
