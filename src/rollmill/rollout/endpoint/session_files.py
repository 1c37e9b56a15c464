"""Writes committed sessions to files."""

from __future__ import annotations

from pathlib import Path

from rollmill.rollout.endpoint.session import EndpointSession, FinishedSession
from rollmill.trackers.rollout_log import ROLLOUTS_FOLDER, RolloutLog


class SessionFileSink:
    """A SessionSink that writes every session to FOLDER/rollouts/step-N.jsonl, for `load_experiences(FOLDER)`."""

    def __init__(self, folder: Path) -> None:
        self._store = RolloutLog(folder / ROLLOUTS_FOLDER)
        before = [int(path.stem.removeprefix("step-")) for path in self._store.folder.glob("step-*.jsonl")]
        self._last = max(before, default=0)

    def check(self, session: EndpointSession) -> None:
        """See SessionSink: rewards may come later."""

    def take(self, finished: FinishedSession) -> int:
        """See SessionSink. Raises RollmillError if the file cannot be written."""
        self._last += 1
        self._store.write(self._last, finished.experiences)
        return 0
