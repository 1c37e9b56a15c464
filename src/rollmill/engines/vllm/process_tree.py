"""Watches vLLM's subprocesses.

If one ends, vLLM tells requests, but not the calls that wait for it, such as one that loads weights: these would wait
for ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, suppress

import psutil

STOPPED_S = 30.0
"""Seconds for which a process may be stopped (SIGSTOP) before it counts as lost."""
_LOOK_S = 2.0
_TITLE, _FORKED = "VLLM::", "rollmill.engines.vllm.worker"
"""Names of the subprocesses that vLLM needs: the title that it gives them, or the command that was forked. Others, such
as those that compile, may end at any time."""


def find_needed(pid: int) -> dict[int, str]:
    """Find the subprocesses that the started vLLM process `pid` needs; returns their names, for messages, by id."""
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if command.startswith(_TITLE):
                    found[process.pid] = command.removeprefix(_TITLE).split()[0]
                elif _FORKED in command:
                    found[process.pid] = "subprocess"
    return found


async def wait_for_loss(pid: int, names: dict[int, str]) -> str:
    """Wait until one of the subprocesses `names` of the vLLM process `pid` has ended, or one of all of them is stopped;
    say which."""
    loop, lost = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    with ExitStack() as stack:
        for child, name in names.items():
            try:
                descriptor = os.pidfd_open(child)
            except ProcessLookupError:
                return _has_ended(child, name)
            stack.callback(os.close, descriptor)
            loop.add_reader(descriptor, _set_once, lost, _has_ended(child, name))
            stack.callback(loop.remove_reader, descriptor)
        since: dict[int, float] = {}
        while not (await asyncio.wait([lost], timeout=_LOOK_S))[0]:
            stopped = await asyncio.to_thread(_find_stopped, [pid, *names])
            since = {each: since.get(each, time.monotonic()) for each in stopped}
            for each, began in since.items():
                if time.monotonic() - began > STOPPED_S:
                    return f"its {names.get(each, 'main process')} (process {each}) is stopped for {STOPPED_S:.0f} s"
        return str(lost.result())


def _has_ended(pid: int, name: str) -> str:
    return f"its {name} (process {pid}) has ended"


def _set_once(lost: asyncio.Future[str], text: str) -> None:
    if not lost.done():
        lost.set_result(text)


def _find_stopped(pids: list[int]) -> list[int]:
    stopped = []
    for pid in pids:
        with suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                stopped.append(pid)
    return stopped
