"""Processes that run environments of the library verifiers, in the Python that has it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

from rollmill.data.verifiers import program_command, program_environment, program_settings
from rollmill.errors import ConfigError, EpisodeError

if TYPE_CHECKING:
    from rollmill.rollout.workflows.verifiers import VerifiersWorkflow

_LONGEST_LINE = 64 << 20
_KEPT_BYTES = 2000
_START_S = 300.0


class VerifiersProcess:
    """One process, with several concurrent runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._printed = b""  # the last bytes of stderr
        self._listening = asyncio.ensure_future(self._listen())
        self._reading = asyncio.ensure_future(self._read())
        self.begun = 0

    @classmethod
    async def start(cls, config: VerifiersWorkflow) -> VerifiersProcess:
        """Start a process, and wait until its environment is loaded.

        Raises ConfigError: there is no such Python, or no such taskset.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *program_command(config.python),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=program_environment(),
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        made = cls(process)
        settings = program_settings(
            config.taskset, config.options, env=config.env, harness=config.harness, turns=config.turns
        )
        try:
            async with asyncio.timeout(_START_S):
                await made._request(0, settings)
        except (EpisodeError, TimeoutError) as error:
            await made.close()
            why = str(error) or f"it takes longer than {_START_S:g} s"
            raise ConfigError(f"workflow.taskset: verifiers does not load {config.taskset}: {why}") from error
        except BaseException:
            await made.close()
            raise
        return made

    @property
    def ended(self) -> bool:
        """True if it takes no more runs."""
        return self._listening.done()

    @property
    def idle(self) -> bool:
        """True if it has no running runs."""
        return not self._awaited

    async def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a run; cancelling stops the run. Raises EpisodeError if it fails, or the process ends."""
        self.begun += 1
        number = next(self._numbers)
        try:
            return await self._request(number, {"id": number, **message})
        except asyncio.CancelledError:
            self._write({"id": number, "cancel": True})
            raise

    async def close(self) -> None:
        """Kill the process and its subprocesses; may be called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process._transport.close()  # type: ignore[attr-defined]  # its subprocesses may hold its output open
        await self._process.wait()
        await asyncio.gather(self._listening, self._reading, return_exceptions=True)

    async def _request(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        if self.ended:
            raise self._gone()
        awaited = self._awaited[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(message)
            found: dict[str, Any] = await awaited
        finally:
            del self._awaited[number]
        if "error" in found:
            raise EpisodeError(found["error"])
        return found

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(message)}\n".encode())

    async def _listen(self) -> None:
        """Dispatch replies; when the process ends, fail all pending ones."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                found = json.loads(line)
                awaited = self._awaited.get(found["id"])
                if awaited is not None and not awaited.done():
                    awaited.set_result(found)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._reading}, timeout=1.0)  # its last output
            for awaited in self._awaited.values():
                if not awaited.done():
                    awaited.set_exception(self._gone())

    async def _read(self) -> None:
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(1 << 16):
            self._printed = (self._printed + part)[-_KEPT_BYTES:]

    def _gone(self) -> EpisodeError:
        printed = self._printed.decode("utf-8", "replace").strip()
        return EpisodeError(f"the process that runs verifiers has ended: {printed or 'it printed nothing'}")


class VerifiersProcessPool:
    """The process that takes runs, replaced when it has ended or done enough, and older ones that finish theirs."""

    def __init__(self, config: VerifiersWorkflow) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._current: VerifiersProcess | None = None
        self._finishing: list[VerifiersProcess] = []
        self._places = asyncio.Semaphore(config.at_once)

    async def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do one run. Raises EpisodeError if it fails or takes too long, ConfigError if no process can be started."""
        async with self._places:
            process = await self._process()
            try:
                async with asyncio.timeout(self._config.time_limit_s):
                    return await process.run(message)
            except TimeoutError:
                limit = self._config.time_limit_s
                raise EpisodeError(f"it took longer than workflow.time_limit_s ({limit:g} s)") from None

    async def close(self) -> None:
        """Stop the processes; may be called twice."""
        living, self._current, self._finishing = [self._current, *self._finishing], None, []
        for process in living:
            if process is not None:
                await process.close()

    async def _process(self) -> VerifiersProcess:
        async with self._lock:
            current = self._current
            if current is not None and (current.ended or current.begun >= self._config.restart_after):
                self._finishing.append(current)
                self._current = current = None
            for process in [each for each in self._finishing if each.idle]:
                self._finishing.remove(process)
                await process.close()
            if current is None:
                current = self._current = await VerifiersProcess.start(self._config)
            return current
