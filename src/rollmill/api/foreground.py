"""Running something long from a script or a notebook cell: with signals, progress, and beside a running event loop."""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rollmill.orchestrator.interrupt import Interrupts
from rollmill.plugins import call_hook
from rollmill.startup import open_missing_streams
from rollmill.trackers.console import Stages
from rollmill.trackers.metrics_log import Metrics
from rollmill.trackers.run_views import RunView, make_view
from rollmill.types import Experience

_POLL_S = 0.2
_ENDING = "ending with a checkpoint of the last step; interrupt again to leave at once"
Result = TypeVar("Result")
Work = Callable[[RunView, Interrupts], Result]


def run_in_foreground(work: Work[Result], show_completions: int = 1) -> Result:
    """Run `work` to its end, and return its result; raises what it raises.

    In a thread with a running event loop, as a notebook's cells have, the work gets a thread and an event loop of its
    own, and this one shows its progress. Interrupting this thread asks the work to stop: it ends with a checkpoint, and
    KeyboardInterrupt is raised.

    Args:
        work: takes the view that shows it, and the interrupts to listen to.
    """
    open_missing_streams()
    view = _make_view(show_completions)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work(view, Interrupts())
    return _run_beside_loop(work, view)


def _run_beside_loop(work: Work[Result], view: RunView) -> Result:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    interrupts, results, failures = Interrupts(), list[Result](), list[BaseException]()

    def target() -> None:
        try:
            results.append(work(QueuedView(view, calls), interrupts))
        except BaseException as error:  # raised again in the thread that waits
            failures.append(error)
        calls.put(lambda: None)

    thread = threading.Thread(target=target, name="rollmill-run", daemon=True)
    thread.start()
    with _raising_on_sigint():
        while thread.is_alive() or not calls.empty():
            try:
                _show_next(calls)
            except KeyboardInterrupt:
                if interrupts.requested:
                    raise
                interrupts.request()
                view.message(_ENDING)
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def _raising_on_sigint() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this thread; asyncio's own handler only cancels a task, which waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _show_next(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    try:
        call = calls.get(timeout=_POLL_S)
    except queue.Empty:
        return
    call()


class QueuedView:
    """A RunView whose calls another thread makes: notebooks show what the thread of the cell displays."""

    def __init__(self, view: RunView, calls: queue.SimpleQueue[Callable[[], None]]) -> None:
        self._view, self._calls = view, calls

    def start(self, run_name: str, stages: Stages) -> None:
        self._calls.put(lambda: self._view.start(run_name, stages))

    def resume(self, history: Sequence[Metrics]) -> None:
        self._calls.put(lambda: self._view.resume(history))

    def message(self, text: str) -> None:
        self._calls.put(lambda: self._view.message(text))

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        self._calls.put(lambda: self._view.step(metrics, experiences))

    def evaluation(self, metrics: Metrics) -> None:
        self._calls.put(lambda: self._view.evaluation(metrics))

    def close(self) -> None:
        self._calls.put(self._view.close)


def _make_view(show_completions: int) -> RunView:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    in_notebook = getattr(shell, "kernel", None) is not None
    view: RunView | None = call_hook("notebook_view", show_completions) if in_notebook else None
    return make_view(show_completions) if view is None else view
