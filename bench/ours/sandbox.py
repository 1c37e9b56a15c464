"""Worker: our sandbox with a trivial program, and with a trivial statement in a session."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import cast

from bench.peers.processes import PROGRAM, timed
from bench.worker import Channel, serve, versions
from rollmill.sandbox import Sandbox
from rollmill.sandbox.backend import BackendName

EXECUTIONS = 500
STARTS = 30


def main() -> None:
    channel = Channel()
    with Sandbox(jobs=1, backend=cast(BackendName, sys.argv[1])) as sandbox:

        def once() -> str:
            return sandbox.run_sync(PROGRAM).stdout

        def measure() -> dict[str, float]:
            return timed(once, int(sys.argv[2])) | asyncio.run(_sessions(sandbox))

        once()
        serve(channel, measure, versions=versions())


async def _sessions(sandbox: Sandbox) -> dict[str, float]:
    """Median milliseconds to start a session, and of an execution's round trip."""
    starts, trips = [], []
    for _ in range(STARTS):
        began = time.perf_counter()
        async with sandbox.session():
            starts.append(time.perf_counter() - began)
    async with sandbox.session() as session:
        for _ in range(EXECUTIONS):
            began = time.perf_counter()
            assert (await session.execute("1 + 1")).value == "2"
            trips.append(time.perf_counter() - began)
    return {"session_start_ms": statistics.median(starts) * 1e3, "execute_ms": statistics.median(trips) * 1e3}


if __name__ == "__main__":
    main()
