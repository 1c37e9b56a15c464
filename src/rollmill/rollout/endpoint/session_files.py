"""Committed sessions as files."""

from __future__ import annotations

from pathlib import Path

from rollmill.rollout.endpoint.session import EndpointSession, FinishedSession
from rollmill.trackers.rollout_log import ROLLOUTS_FOLDER, RolloutLog


class SessionFileSink:
    """A Sink that writes every session to FOLDER/rollouts/step-N.jsonl, where `load_experiences(FOLDER)` finds it."""

    def __init__(self, folder: Path) -> None:
        self._store = RolloutLog(folder / ROLLOUTS_FOLDER)
        before = [int(path.stem.removeprefix("step-")) for path in self._store.folder.glob("step-*.jsonl")]
        self._last = max(before, default=0)

    def check(self, session: EndpointSession) -> None:
        """See Sink: rewards may come later."""

    def take(self, finished: FinishedSession) -> int:
        """See Sink. Raises RollmillError where the file cannot be written."""
        self._last += 1
        self._store.write(self._last, finished.experiences)
        return 0
