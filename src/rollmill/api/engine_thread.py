"""An engine on an event loop of its own, for callers without one, or with a running one, such as a notebook's cells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from rollmill.concurrency import gather_or_cancel
from rollmill.engines.base import GenerationRequest, RolloutEngine
from rollmill.errors import EngineError
from rollmill.types import Completion

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class EngineThread:
    """Runs an engine's methods in one thread, and waits for them. The caller's number of torch threads holds there."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._closed = engine, False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(),), name="rollmill-engine", daemon=True
        )
        self._thread.start()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._loop.run_forever()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Returns the completions of every request. Interrupting the caller cancels them; raises EngineError."""

        async def generated() -> list[list[Completion]]:
            return await gather_or_cancel([self._engine.generate(each) for each in requests])

        return self._wait(generated())

    def call(self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls a function that talks to the engine, such as a publisher of weights."""

        async def called() -> Result:
            return function(*args, **kwargs)

        return self._wait(called())

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            work.close()
            raise EngineError("the policy is closed; make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the engine and the thread; a second call does nothing."""
        if self._closed:
            return
        self._wait(self._engine.close())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
