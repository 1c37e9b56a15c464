"""The native rollout engine: requests, and the task that makes the steps of an EngineCore while there are any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from rollmill.engines.base import GenerationRequest
from rollmill.engines.native.core import EngineCore
from rollmill.engines.native.sequence import SequenceGroup, build_sequence_group
from rollmill.engines.native.weights import EngineWeights
from rollmill.errors import EngineError
from rollmill.progress import Progress, count_progress
from rollmill.types import Completion

_LOOP_TURNS = 8  # of the event loop, from a completion to the next request of a workflow that waits for nothing else
_QUIET_S, _MOST_GATHERED_S = 0.002, 0.05


class NativeEngine:
    """A RolloutEngine over any transformers causal LM whose layers use the attention interface.

    Args:
        model: the trained model, or any other; its parameters are read, never written.
        tokenizer: for texts and stop strings; None gives empty texts.
        eos_ids: every token id that ends a completion.
        context: longest sequence, prompt included.
        dtype: compute type; a model of that type is used as it is.
        max_sequences: rows decoded at the same time.
        prefill_tokens: prompt tokens per step.
        keep: running completions keep the keys and values of older weights when new weights arrive.
        prefix_cache_bytes: memory for finished turns, which the next turn of a conversation starts from.
        record_routing: record the experts of every token, for Completion.routing; the model must have routers.
        int8: linear layers multiply in 8 bits.
        device: where it computes; None: where the model is.
        cache_gb: limit of the KV cache in GiB; completions that do not fit wait, the newest first. None: no limit.
    """

    applies_processors = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        eos_ids: frozenset[int] = frozenset(),
        context: int,
        dtype: torch.dtype = torch.float32,
        max_sequences: int = 256,
        prefill_tokens: int = 2048,
        keep: bool = False,
        record_routing: bool = False,
        prefix_cache_bytes: int = 1 << 30,
        int8: bool = False,
        device: torch.device | None = None,
        cache_gb: float | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._context = context
        model.eval()  # the trainer switches to training mode where it needs it
        self.core = EngineCore(
            model,
            context=context,
            dtype=dtype,
            max_sequences=max_sequences,
            prefill_tokens=prefill_tokens,
            keep=keep,
            record_routing=record_routing,
            prefix_cache_bytes=prefix_cache_bytes,
            int8=int8,
            device=device,
            cache_gb=cache_gb,
        )
        self._paused = False
        self._failure: BaseException | None = None
        self._driver: asyncio.Task[None] | None = None
        self._step_seconds = 0.0  # of the last step

    @property
    def copied_weights(self) -> EngineWeights | None:
        """Its weights, if they are a copy of all trained parameters, which can be filled from elsewhere."""
        return None if self.core.weights.needs_trained else self.core.weights

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def tokens_generated(self) -> int:
        return self.core.tokens_generated

    async def wait_for_tokens(self) -> None:
        """Lets the driver make one step."""
        await asyncio.sleep(0)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return sorted([completion async for completion in self.stream(request)], key=lambda c: c.index)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Raises EngineError for requests that cannot be served."""
        group = self.submit(request)
        try:
            for _ in range(request.n):
                result = await group.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self.core.abort(group)

    def interrupt(self) -> None:
        self.core.interrupt()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._ensure_driver()

    def weights_updated(self, version: int) -> None:
        """Running completions keep their tokens; cached keys and values are recomputed or kept."""
        self.core.weights_updated(version)

    async def drain(self) -> None:
        while self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])

    async def sleep(self, *, destroy: bool = False) -> None:
        """No-op: the stage's offload plan moves this engine's memory."""

    def counters(self) -> dict[str, float]:
        """Counts of drafts and guesses, of decode steps, of prompt tokens that the prefix cache was asked for, and of
        completions that waited for memory; the peak of the KV cache in bytes."""
        prefixes = self.core.prefixes
        counts = {"prefix_cache_hits": float(prefixes.hits), "prefix_cache_queries": float(prefixes.queries)}
        counts |= {"preemptions": float(self.core.preemptions), "cache_peak": float(self.core.cache_peak)}
        return asdict(self.core.drafting.counts) | asdict(self.core.decode_counts) | counts

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
            self._driver = None
        self.core.fail(EngineError("the engine was closed while the request was running"))

    def submit(self, request: GenerationRequest) -> SequenceGroup:
        """Queue a request; its completions arrive in the `results` queue of the returned group."""
        if self._failure is not None:
            raise EngineError(f"the engine has failed and takes no more requests: {self._failure}") from self._failure
        if self.core.is_recurrent and (request.drafts or request.sampling.ngram_draft is not None):
            raise EngineError(
                f"{request.id}: the model has recurrent layers, whose state cannot go back to before a draft that is "
                "rejected; ask without drafts and ngram_draft"
            )
        group = build_sequence_group(request, self._tokenizer, self._eos_ids, self._context)
        if group.unfinished:
            self.core.add(group)
        self._ensure_driver()
        return group

    async def _gather(self) -> None:
        """Wait for the next turns of conversations, so that they share a pass, while no completion is running.

        It takes at most as long as the last step, and ends as soon as none arrives: a tool may take its time.
        """
        ends = time.perf_counter() + min(self._step_seconds, _MOST_GATHERED_S)
        for _ in range(_LOOP_TURNS):  # those without threads arrive here, in the same number on any machine
            await asyncio.sleep(0)
        arrived = time.perf_counter()
        while (missing := self.core.expected) and time.perf_counter() < min(ends, arrived + _QUIET_S):
            await asyncio.sleep(_QUIET_S / 8)
            if self.core.expected < missing:
                arrived = time.perf_counter()
        self.core.expected = 0

    def _ensure_driver(self) -> None:
        """Start the task that makes the steps, unless it runs or there is nothing to do."""
        if not self._paused and self.core.has_work and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while self.core.has_work and not self._paused:
                if self.core.expected and not self.core.is_decoding:
                    await self._gather()
                    continue  # it may have been paused, or its requests aborted
                began = time.perf_counter()
                self.core.step()
                self._step_seconds = time.perf_counter() - began
                count_progress(Progress.TOKENS)
                await asyncio.sleep(0)
        except Exception as error:
            self._failure = error
            self.core.fail(error)
