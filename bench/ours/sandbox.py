"""Worker: our sandbox with a trivial program, and with a trivial statement in a session."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from sandbox_speed import run_in_sandbox, time_programs, time_sessions

from bench.worker import Channel, serve, versions
from rollmill_sandbox import BackendChoice, Sandbox


def main() -> None:
    channel = Channel()
    with Sandbox(jobs=1, backend=cast(BackendChoice, sys.argv[1])) as sandbox:
        once, count = run_in_sandbox(sandbox), int(sys.argv[2])
        once()
        serve(channel, lambda: time_programs(once, count) | asyncio.run(time_sessions(sandbox)), versions=versions())


if __name__ == "__main__":
    main()
