"""Runs a tracker in a thread of its own, so that a slow or absent service never holds up training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from rollmill.errors import RollmillError
from rollmill.trackers.metrics_log import Metrics, Tracker
from rollmill.types import Experience

_Record = tuple[Metrics, tuple[Experience, ...]]


class BackgroundTracker:
    """Builds a tracker in a thread, and passes records to it there, in order.

    An exception of `build` is raised at once, one of the tracker by the next `write` or `close`; what follows is lost.
    The client libraries also replace signal handlers only where they are built in the main thread.

    Args:
        build: makes the tracker.
        completions: the tracker gets so many of a step's experiences.
        longest_queue: records that may wait; with more, `write` raises RollmillError.
        open_timeout, close_timeout: seconds until the tracker must be built; and after `close` must have written and
            closed. Then RollmillError is raised.
    """

    def __init__(
        self,
        build: Callable[[], Tracker],
        *,
        completions: int = 0,
        longest_queue: int = 10_000,
        open_timeout: float = 120.0,
        close_timeout: float = 60.0,
    ) -> None:
        self._completions = completions
        self._close_timeout = close_timeout
        self._records: queue.Queue[_Record | None] = queue.Queue(longest_queue)
        self._failure: BaseException | None = None
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(build,), name="tracker", daemon=True)
        self._thread.start()
        if not self._built.wait(open_timeout):
            raise RollmillError(f"it could not be opened within {open_timeout:g} s; see whether its service is there")
        self._raise_failure()

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Queue a record and return at once."""
        self._raise_failure()
        try:
            self._records.put_nowait((dict(metrics), tuple(experiences[: self._completions])))
        except queue.Full:
            raise RollmillError(
                f"it is {self._records.maxsize} records behind; see whether its service is there"
            ) from None

    def close(self) -> None:
        """Wait until the tracker has written all records and has closed."""
        if self._failure is None:
            try:
                self._records.put(None, timeout=self._close_timeout)
                self._thread.join(self._close_timeout)
            except queue.Full:
                pass
        self._raise_failure()
        if self._thread.is_alive():
            raise RollmillError(
                f"it has not ended within {self._close_timeout:g} s, with {self._records.qsize()} records to write; "
                "metrics.jsonl has them all"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, build: Callable[[], Tracker]) -> None:
        try:
            tracker = build()
            self._built.set()
            while (record := self._records.get()) is not None:
                tracker.write(*record)
            tracker.close()
        except BaseException as error:  # also SystemExit, which a client may raise; the monitor reports it
            self._failure = error
            self._built.set()
