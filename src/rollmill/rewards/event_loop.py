"""An event loop in a thread of its own, which no training step holds up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from rollmill.errors import RewardError

Result = TypeVar("Result")


class EventLoopThread:
    """Runs coroutines of any caller in one event loop; its thread starts when first needed.

    `finish` is awaited there before the loop ends.
    """

    def __init__(self, name: str, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._name, self._finish = name, finish
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result. When the caller is cancelled, so is the coroutine, and it may clean up first.

        Raises RewardError where the loop is closed meanwhile.
        """
        ended: Future[None] = Future()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(_signalling(coroutine, ended), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=1.0)
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise RewardError("the judge was closed before its model replied") from None

    def close(self) -> None:
        """Cancel what runs and end the thread. May be called twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            if self._finish is not None:
                loop.run_until_complete(self._finish())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; when one fails, the others are cancelled and awaited before its error goes on."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 (it has a cause of its own)
    return [task.result() for task in tasks]


async def _signalling(coroutine: Coroutine[Any, Any, Result], ended: Future[None]) -> Result:
    try:
        return await coroutine
    finally:
        ended.set_result(None)
