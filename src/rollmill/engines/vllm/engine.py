"""vLLM as the rollout engine. New weights arrive through shared memory, whenever the trainer publishes a version.

The process starts at the first request. A process that dies is restarted with the newest weights, and its requests
start over, except those whose tokens were already passed to a callback.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from rollmill.engines.base import GenerationRequest
from rollmill.engines.vllm.process import VLLMLaunchConfig, VLLMProcess
from rollmill.engines.vllm.sequence import NOTHING_MORE, VLLMSequence, build_vllm_sequence_group
from rollmill.errors import DeadlineError, EngineError, EngineLostError, RollmillError
from rollmill.progress import Progress, count_progress
from rollmill.types import Completion
from rollmill.waiting import OUTAGES

_MOMENT_S = 0.01
_log = logging.getLogger(__name__)
_TOLD = {"", "ipc"}  # ways by which weights came, of which the user need not be told any more


class VLLMEngine:
    """A RolloutEngine that runs vLLM in another process.

    Args:
        launch: how the process is started; its folder is removed at the end. `tokenizer`: for texts and stop strings.
        eos_ids: every token id that ends a completion.
        context: longest sequence, prompt included.
        restarts: how often a process that has died is restarted.
        checksum: the checksum that its Python can verify weights with.
    """

    def __init__(
        self,
        launch: VLLMLaunchConfig,
        tokenizer: Any,
        *,
        eos_ids: frozenset[int],
        context: int,
        restarts: int = 2,
        checksum: str,
    ) -> None:
        self.version = 0
        self.weights_path = Path(launch.settings["weights"])  #: where weights are sent to
        self.checksum, self.deadline_s = checksum, launch.deadline_s
        self.tokens_generated = 0
        self.sleeps = "enable_sleep_mode" in launch.settings["arguments"]  #: started with sleep mode
        self._launch, self._tokenizer = launch, tokenizer
        self._removed = weakref.finalize(self, shutil.rmtree, launch.folder, ignore_errors=True)
        self._eos_ids, self._context = eos_ids, context
        self._restarts_left = restarts
        self._numbers = itertools.count(1)
        self._running: dict[int, VLLMSequence] = {}
        self._process: VLLMProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[asyncio.Task[None]] = []  # clean-up of processes that have died
        self._failure: RollmillError | None = None
        self._counts: Counter[str] = Counter()

    # -- the RolloutEngine protocol ------------------------------------------------------------------------------

    async def wait_for_tokens(self) -> None:
        """Waits a moment, since tokens come from another process."""
        await asyncio.sleep(_MOMENT_S)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return sorted([completion async for completion in self.stream(request)], key=lambda c: c.index)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Raises EngineError for requests that cannot be served, and if the process dies."""
        group = build_vllm_sequence_group(request, self._tokenizer, self._eos_ids, self._context)
        samples = group.sequences(self._numbers)
        self._submit(samples)
        try:
            for _ in samples:
                result = await group.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            for sample in samples:
                if self._running.pop(sample.number, None) is not None and self._process is not None:
                    self._process.send("abort", sample.number)

    def interrupt(self) -> None:
        """Completions are returned once vLLM has confirmed the abort."""
        if self._process is None:
            for sample in list(self._running.values()):
                self._hand_out(sample, sample.completion(NOTHING_MORE))
            return
        for number in self._running:
            self._process.send("abort", number)

    def pause(self) -> None:
        self._paused = True
        if self._process is not None:
            self._begin(self._answer(self._process, self._process.request("pause")))

    def resume(self) -> None:
        self._paused = False
        if self._process is not None:
            self._begin(self._answer(self._process, self._process.request("resume")))

    def weights_updated(self, version: int) -> None:
        """Later requests are sampled with the new weights; running ones are kept."""
        self.version = version
        if self._process is not None:
            self._counts["updates"] += 1
            self._begin(self._update(self._process, self._process.request("load", version=version), version))

    async def sleep(self, *, destroy: bool = False) -> None:
        """Uses vLLM's sleep mode, if it was started with it."""
        if destroy:
            await asyncio.gather(*self._tasks, *filter(None, [self._starting]))
            process, self._process = self._process, None
            if process is not None:
                self._counts["destroyed"] += 1
                await process.close(keep_folder=True)
        elif self._process is not None and self.sleeps:
            self._counts["sleeps"] += 1
            await self._answer(self._process, self._process.request("sleep"))

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        while self._running and not self._paused and self._failure is None:
            await asyncio.sleep(0.01)

    def counters(self) -> dict[str, float]:
        """Weight updates, their seconds and how many came by CUDA IPC; sleeps, and restarts of the process."""
        return dict(self._counts)

    async def close(self) -> None:
        self._failure = self._failure or EngineError("the engine was closed")
        for task in (*self._tasks, *([] if self._starting is None else [self._starting])):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None:
            await process.close()
        await asyncio.gather(*self._ended)
        self._fail(EngineError("the engine was closed while the request was running"))
        self._removed()

    @property
    def pid(self) -> int | None:
        """Process id of vLLM's process, while it runs."""
        return None if self._process is None else self._process.pid

    # -- requests ----------------------------------------------------------------------------------------------

    def _submit(self, samples: list[VLLMSequence]) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed and takes no more requests: {self._failure}") from self._failure
        begun = [sample for sample in samples if sample.stop_reason is None]
        for sample in [each for each in samples if each not in begun]:  # its prefix has ended already
            sample.group.results.put_nowait(sample.completion(NOTHING_MORE))
        self._running |= {sample.number: sample for sample in begun}
        if self._process is not None:
            self._send(self._process, begun)
        elif begun and self._starting is None:
            self._starting = asyncio.ensure_future(self._start())

    def _send(self, process: VLLMProcess, samples: list[VLLMSequence]) -> None:
        for group, own in itertools.groupby(samples, lambda sample: sample.group):
            process.send("generate", 0, **group.message(list(own)))

    def _told(self, message: dict[str, Any]) -> None:
        """Handle a message of the process about a completion."""
        if tokens := len(message.get("tokens", ())):
            self.tokens_generated += tokens
            count_progress(Progress.TOKENS)
        sample = self._running.get(message["id"])
        if sample is None:
            return  # aborted
        if "error" in message:
            self._hand_out(sample, EngineError(f"{sample.group.request.id}: vLLM: {message['error']}"))
            return
        if sample.add(message) and "ended" not in message and self._process is not None:
            self._process.send("abort", sample.number)
        if "ended" in message:
            self._hand_out(sample, sample.completion(message))

    def _hand_out(self, sample: VLLMSequence, result: Completion | RollmillError) -> None:
        del self._running[sample.number]
        sample.group.results.put_nowait(result)

    def _fail(self, error: RollmillError) -> None:
        for sample in list(self._running.values()):
            self._hand_out(sample, error)

    # -- the process -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start the process with the newest weights, and send it the waiting requests."""
        try:
            process, version = await VLLMProcess.start(self._launch, self._told, self._died)
        except RollmillError as error:
            return self._give_up(error)
        finally:
            self._starting = None
        self._process = process
        if process.ended:
            self._died()
            return
        if version != self.version:
            self._begin(self._update(process, process.request("load", version=self.version), self.version))
        if self._paused:
            self._begin(self._answer(process, process.request("pause")))
        self._send(process, list(self._running.values()))

    def _died(self) -> None:
        """Handle the unexpected end of the process: restart it, or fail all requests."""
        process, self._process = self._process, None
        if process is None:
            return  # it died while starting: `_start` handles that
        self._ended.append(asyncio.ensure_future(process.close()))
        error = process.gone()
        if self._failure is not None or self._restarts_left == 0:
            times = f"{self._counts['restarts'] + 1} times in this stage" if self._counts["restarts"] else "once"
            self._give_up(EngineLostError(f"vLLM was lost {times} (engine.restarts); the last time {error}"))
            return
        self._restarts_left -= 1
        self._counts["restarts"] += 1
        OUTAGES.tell(f"{str(error).partition('.')[0]}; it is started again, and its requests are generated again")
        for sample in list(self._running.values()):
            if sample.told:
                self._hand_out(sample, error)
            else:
                sample.again()
        if self._running:
            self._starting = asyncio.ensure_future(self._start())

    async def _update(self, process: VLLMProcess, reply: Coroutine[Any, Any, Any], wanted: int) -> None:
        began = time.perf_counter()
        if (answer := await self._answer(process, reply)) is not None:
            version, how = answer
            if version < wanted:
                self._give_up(EngineError(f"vLLM's process has weights of version {version}; {wanted} was announced"))
            self._counts.update(["ipc_updates"] if how == "ipc" else [])
            if how not in _TOLD:
                _TOLD.add(how)
                _log.warning("vLLM reads weights from host memory, and not by CUDA IPC: %s", how)
        self._counts["update_seconds"] += time.perf_counter() - began  # type: ignore[assignment]

    async def _answer(self, process: VLLMProcess, reply: Coroutine[Any, Any, Any]) -> Any:
        """Await a reply. Returns None on an error, which stops the engine; one of a process that has died, or does not
        answer and is killed, is for `_died`."""
        try:
            return await reply
        except DeadlineError as error:
            process.kill(str(error))
            return None
        except RollmillError as error:
            if process is self._process:
                self._give_up(error)
            return None

    def _give_up(self, error: RollmillError) -> None:
        """Stop the process and fail all requests."""
        self._failure = self._failure or error
        if self._process is not None:
            self._process.kill()
        self._fail(error)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
