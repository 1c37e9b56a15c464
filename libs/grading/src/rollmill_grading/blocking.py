"""Graders for callers without an event loop: processes of their own, and waiting for verdicts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.verdict import Verdict


class PooledGrader:
    """A grader with grader processes: of a pool that it is given, or its own, which start when a formula needs them.

    A process that was forked, or that loaded a pickled grader, starts its own.

    Args:
        pool: the caller closes it.
        workers: the number of its own processes.
        time_limit_s: guard against a hang in one formula; the process is then killed and the outcome is `timeout`. Far
            above what a comparison takes: its steps are limited, so that no verdict depends on the load of the machine.
    """

    def __init__(self, pool: GraderPool | None = None, *, workers: int = 1, time_limit_s: float = 60.0) -> None:
        self._given, self._workers, self.time_limit_s = pool, workers, time_limit_s
        self._own: GraderPool | None = None
        self._owner = 0

    @property
    def pool(self) -> GraderPool:
        if self._given is not None:
            return self._given
        if self._own is None or self._owner != os.getpid():
            self._own, self._owner = GraderPool(self._workers), os.getpid()
        return self._own

    def close(self) -> None:
        """Kill its own processes. The next formula starts new ones."""
        if self._own is not None and self._owner == os.getpid():
            self._own.close()
        self._own = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}


def wait_for_verdicts(begun: Sequence[Verdict | Awaitable[Verdict]]) -> list[Verdict]:
    """Return the verdicts, in order. Also where an event loop runs in this thread, which then waits, too."""
    if not any(isinstance(each, Awaitable) for each in begun):
        return [each for each in begun if isinstance(each, Verdict)]

    async def gathered() -> list[Verdict]:
        return await asyncio.gather(*(_verdict_of(each) for each in begun))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gathered())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, gathered()).result()


async def _verdict_of(begun: Verdict | Awaitable[Verdict]) -> Verdict:
    return begun if isinstance(begun, Verdict) else await begun
