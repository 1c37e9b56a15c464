"""What happened when: spans of work, collected while a step runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GENERATE, REWARD = "generate", "reward/"
"""Kinds of spans: a completion, and, followed by its name, a reward's judgement."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one kind: `time.perf_counter()` seconds. Between `asked` and `started` it waited for its turn."""

    kind: str
    asked: float
    started: float
    ended: float


class Trace:
    """Spans in the order they ended."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, kind: str, asked: float, started: float, ended: float) -> None:
        """Note some work that has ended."""
        self._spans.append(Span(kind, asked, started, ended))

    @contextmanager
    def record_span(self, kind: str, waits_for: str = "") -> Iterator[None]:
        """Note what happens inside; `waits_for` is for those who watch."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, started, started, time.perf_counter())

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self._spans = self._spans, []
        return taken


def max_queue_depth(spans: list[Span]) -> int:
    """How many of them waited for their turn at the same time, at most."""
    moves = [(span.asked, 1) for span in spans if span.started > span.asked]
    moves += [(span.started, -1) for span in spans if span.started > span.asked]
    depth = deepest = 0
    for _, move in sorted(moves):
        depth += move
        deepest = max(deepest, depth)
    return deepest
