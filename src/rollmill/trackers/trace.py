"""Trace of a training step: time spans of generation, rewards and phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GENERATE, REWARD = "generate", "reward/"
"""Kinds of spans: a completion, and a reward (a prefix; the reward's name follows)."""
ON_DEVICE = "device/"
"""Kind of a component that is on the device during a phase: `device/PHASE/NAME`."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work, in `time.perf_counter()` seconds; between `requested` and `started` it was queued."""

    kind: str
    requested: float
    started: float
    ended: float
    bytes: int = 0  #: size of a component on the device


class Trace:
    """Collects spans in the order in which they ended."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, kind: str, requested: float, started: float, ended: float, size: int = 0) -> None:
        """Record finished work, or a component of `size` bytes."""
        self._spans.append(Span(kind, requested, started, ended, size))

    @contextmanager
    def enter_phase(self, kind: str, waits_for: str = "") -> Iterator[None]:
        """Record the body as a span; `waits_for` is used by subclasses that show the activity."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, started, started, time.perf_counter())

    def take(self) -> list[Span]:
        """Spans since the last call."""
        taken, self._spans = self._spans, []
        return taken


def max_queue_depth(spans: list[Span]) -> int:
    """Largest number of spans that were queued at the same time."""
    moves = [(span.requested, 1) for span in spans if span.started > span.requested]
    moves += [(span.started, -1) for span in spans if span.started > span.requested]
    depth = deepest = 0
    for _, move in sorted(moves):
        depth += move
        deepest = max(deepest, depth)
    return deepest
