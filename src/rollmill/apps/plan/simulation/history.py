"""History of a simulated run: what happened when, and who looks at every event."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill.apps.plan.simulation.clock import VirtualLoop


@dataclass(frozen=True, slots=True)
class SimulationEvent:
    """One event. `kind` is such as `publish`, `start`, `train` or `crash`; `facts` are plain values or live objects."""

    at: float  #: virtual seconds
    kind: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        shown = ", ".join(f"{key} {value}" for key, value in self.facts.items() if isinstance(value, int | str | float))
        return f"{self.at:10.4f} s  {self.kind}  {shown}".rstrip()


class EventHistory:
    """Events of a run in order. Listeners see each one and may raise."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.events: list[SimulationEvent] = []
        self.listeners: list[Callable[[SimulationEvent], None]] = []

    def record(self, kind: str, **facts: Any) -> None:
        """Add an event that happens now."""
        event = SimulationEvent(self._loop.time(), kind, facts)
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def digest(self) -> str:
        """A digest of all events: equal for equal histories."""
        return hashlib.sha256("\n".join(map(str, self.events)).encode()).hexdigest()[:16]
