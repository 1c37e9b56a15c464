"""Phases of a step: at the start of each, its components are moved to the device, and its time is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollmill.config.offload import Phase
from rollmill.offload import OffloadManager
from rollmill.offload.plan import ENGINE
from rollmill.trackers.trace import ON_DEVICE, Trace

MOVE = "move"
_PHASES: dict[str, Phase] = {"rollout": "rollout", "eval": "rollout", "inference": "inference", "train": "train"}


class PhaseTrace(Trace):
    """A trace whose span kinds are also offload phases, if the stage has an offload plan; `eval` is the phase
    `rollout`.

    Args:
        says: called with the kind of each new span, and what it waits for.
    """

    def __init__(self, says: Callable[[str, str], None]) -> None:
        super().__init__()
        self._says = says
        self.offloader: OffloadManager | None = None
        self.explorers: Callable[[], dict[str, int]] = dict  #: what explorers elsewhere hold, in bytes by name

    @contextmanager
    def enter_phase(self, kind: str, waits_for: str = "") -> Iterator[None]:
        """Move the components that the phase needs to the device (section `offload`), and count what happens inside
        as its seconds. Raises OffloadError if there is no room for them."""
        self._says(kind, waits_for)
        if kind in _PHASES:
            self.enter(_PHASES[kind])
        began = time.perf_counter()
        with super().enter_phase(kind, waits_for):
            yield
        if self.offloader is not None and kind in _PHASES:
            ended = time.perf_counter()
            device_bytes, explorers = self.offloader.device_bytes(_PHASES[kind]), self.explorers()
            if explorers:
                device_bytes.pop(ENGINE, None)  # the estimate for all of them
            for name, size in (device_bytes | explorers).items():
                self.add(f"{ON_DEVICE}{kind}/{name}", began, began, ended, size)

    def enter(self, phase: Phase) -> None:
        """Move the components that the phase needs to the device."""
        began = time.perf_counter()
        if self.offloader is not None and self.offloader.enter(phase):
            self.add(MOVE, began, began, time.perf_counter())
