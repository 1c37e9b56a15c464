"""The containers of a stage's rollouts: one each, fresh from the image, some of them started before they are needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

from rollmill.errors import EpisodeError
from rollmill.rollout.containers.container import Container
from rollmill.rollout.containers.engine import ContainerEngine
from rollmill.rollout.environments.builtin.container import ContainerEnvironment

if TYPE_CHECKING:
    from rollmill.rollout.workflow import Rollout

_log = logging.getLogger(__name__)


shared_engine = cache(ContainerEngine)
"""This process's connection to an engine."""


class ContainerPool:
    """Starts containers for rollouts, and removes them; at first also those that runs which were killed have left.

    Raises ConfigError if there is no engine.
    """

    def __init__(self, section: ContainerEnvironment) -> None:
        self._section = section
        self._engine = shared_engine(section.engine, section.runtime)
        if left := self._engine.collect():
            _log.warning("removed %d containers of runs that were killed", len(left))
        self._places = asyncio.Semaphore(section.at_once)
        self._threads = ThreadPoolExecutor(section.at_once + section.warm + 4, "rollmill-container")
        self._ready: deque[Future[str]] = deque()
        self._removals: set[Future[None]] = set()
        self._closed = False
        self._started, self._waited_s = 0, 0.0
        self._reported = (0, 0.0)

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[Container]:
        """A container for one rollout; it is removed at the end, with all that it wrote."""
        section = self._section.of_task(rollout.task)
        async with self._places:
            begun = time.perf_counter()
            starting = self._ready.popleft() if section is self._section and self._ready else self._start(section)
            while section is self._section and len(self._ready) < section.warm:  # for those that come next
                self._ready.append(self._start(section))
            try:
                id = await asyncio.wrap_future(starting)
            except BaseException:
                starting.add_done_callback(self._discard)
                raise
            self._started += 1
            self._waited_s += time.perf_counter() - begun
            try:
                yield Container(self._engine, id, section, self._threads)
            finally:
                self._remove(id)

    def _start(self, section: ContainerEnvironment) -> Future[str]:
        def start() -> str:
            with self._engine.episode_errors("a container cannot be started"):
                return self._engine.start(section)

        return self._threads.submit(start)

    def _discard(self, started: Future[str]) -> None:
        """Remove a container that nobody waits for."""
        if not started.cancelled() and started.exception() is None:
            self._remove(started.result())

    def _remove(self, id: str) -> None:
        def remove() -> None:
            try:
                with self._engine.episode_errors(f"container {id[:12]} cannot be removed"):
                    self._engine.remove(id)
            except EpisodeError as error:
                _log.warning("%s; the next run removes it", error)

        if self._closed:  # its threads take no more
            remove()
            return
        removal = self._threads.submit(remove)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        (started, waited), self._reported = self._reported, (self._started, self._waited_s)
        count = self._started - started
        return {
            "containers/started": float(count),
            "containers/start_seconds": (self._waited_s - waited) / max(count, 1),
        }

    async def close(self) -> None:
        """Remove all containers, and wait until they are gone; may be called twice."""
        if self._closed:
            return
        waiting, self._ready = list(self._ready), deque()
        await asyncio.to_thread(wait, waiting)
        for each in waiting:
            self._discard(each)
        await asyncio.to_thread(wait, list(self._removals))
        self._closed = True
        self._threads.shutdown(wait=False)
