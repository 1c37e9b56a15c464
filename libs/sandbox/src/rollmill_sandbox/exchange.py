"""Runs one job from the caller's side: sends the job and receives its result."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from rollmill_sandbox.client import ForkServer
from rollmill_sandbox.limits import ProgramResult
from rollmill_sandbox.protocol import Job, pack_job, parse_result

GRACE_S = 20.0
"""Seconds beyond a program's wall limit, to start it and to transfer its output."""
_CHUNK = 1 << 16


def submit_job(server: ForkServer, job: Job) -> ProgramResult | None:
    """Return the result of a job; None if the server or the job died without one.

    Raises SandboxError if the program could not be started.
    """
    seconds = job.limits.wall_s + GRACE_S
    caller = server.submit(seconds)
    if caller is None:
        return None
    received = bytearray()
    deadline = time.monotonic() + seconds
    with caller:
        try:
            caller.settimeout(seconds)
            with suppress(ConnectionError):  # it may have sent an error before it closed
                caller.sendall(pack_job(job))
            while True:
                caller.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = caller.recv(_CHUNK)
                if not chunk:
                    break
                received += chunk
        except TimeoutError:  # a stopped server, or an overloaded machine
            server.close()
            return None
        except ConnectionError:
            pass
    return parse_result(bytes(received), server.safe)


async def submit_job_async(server: ForkServer, job: Job) -> ProgramResult | None:
    """Run `submit_job` in an event loop."""
    seconds = job.limits.wall_s + GRACE_S
    caller = server.submit(seconds)
    if caller is None:
        return None
    loop = asyncio.get_running_loop()
    received = bytearray()
    with caller:
        caller.setblocking(False)
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):
                    await loop.sock_sendall(caller, pack_job(job))
                while chunk := await loop.sock_recv(caller, _CHUNK):
                    received += chunk
        except TimeoutError:
            await asyncio.to_thread(server.close)
            return None
        except ConnectionError:
            pass
    return parse_result(bytes(received), server.safe)
