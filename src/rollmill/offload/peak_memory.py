"""The most memory that each phase takes: resident set of the process on a CPU, torch's allocations on a GPU."""

from __future__ import annotations

import torch

from rollmill.trackers.host_memory import peak_rss, reset_peak_rss


class PhasePeakMemory:
    """Peaks by phase, in bytes. A phase lasts until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """What is taken from now on is this phase's."""
        self._note()
        self._phase = phase

    def take(self) -> dict[str, int]:
        """The peaks since the last call."""
        self._note()
        taken, self._peaks = self._peaks, {}
        return taken

    def _note(self) -> None:
        """Read the mark, and set it back to what is taken now."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = peak_rss()
            reset_peak_rss()
        if self._phase is not None:
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))
