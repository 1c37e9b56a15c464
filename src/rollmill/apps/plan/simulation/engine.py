"""A simulated engine: completions whose tokens follow from seed, index and weights, at the speed of its costs.

A pass gives each running completion a token, and takes longer the more there are. An engine that shares its process
with the trainer makes a pass per turn of the event loop, as the native engine does; others decode on their own.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollmill.apps.plan.simulation.clock import SimulatedProcess
from rollmill.engines.base import CompletionPrefix, GenerationRequest
from rollmill.types import Completion, IntArray, StopReason

_VOCABULARY = 32_000
_DIGESTS = 1 << 20
"""Digests of weights are below this: log-probs carry them exactly."""
_DONE = 1e-6


def shown_digest(digest: int) -> int:
    """The part of a digest of weights that the log-probs of their tokens show, from 1."""
    return digest % (_DIGESTS - 1) + 1


def simulated_tokens(seed: int, index: int, positions: npt.ArrayLike, digest: int) -> IntArray:
    """Tokens [T] at these positions of a completion, by weights with this digest."""
    mixed = (
        np.asarray(positions, np.int64) * 7919 + index * 104_729 + seed % 1_000_003 * 31 + digest % 1_000_033 * 17
    ) * 40_503
    return (mixed % _VOCABULARY).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SimulationCosts:
    """Costs in seconds. Groups and training times are drawn from measurements."""

    groups: Sequence[Sequence[int]]  #: tokens of each completion, by group
    train_s: Sequence[float]  #: a training step, without publishing
    pass_s: float  #: constant cost of a decode pass
    row_s: float  #: cost of a decode pass per completion in it
    group_s: float = 0.0  #: to start and deliver a group; its explorer does not decode meanwhile
    judge_s: float = 0.0  #: from a group's last token to its rewards
    publish_s: float = 0.0  #: for the trainer to send new weights
    receive_s: float = 0.0  #: for an explorer to receive them
    recompute_s: float = 0.0  #: per running completion then, to recompute its keys and values

    def lengths(self, seed: int, count: int) -> list[int]:
        """Tokens of each of `count` completions of the group with this seed."""
        group = random.Random(seed).choice(self.groups)
        return [group[index % len(group)] for index in range(count)]


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    wanted: GenerationRequest
    finished: asyncio.Queue[Completion]
    submitted: float


@dataclass(slots=True, eq=False)
class _Row:
    """A completion; `began` and `end` are numbers of passes, from its prefix to its last token."""

    request: _SimulatedRequest
    index: int
    length: int
    prefix: CompletionPrefix | None
    began: float = 0.0
    end: float = 0.0
    started: float = 0.0
    segments: list[tuple[int, int]] = field(default_factory=list)  #: first token and version of the weights


class SimulatedEngine:
    """A RolloutEngine of one simulated process.

    Args:
        shares_loop: the engine and the trainer take turns.
        digests: digests of the weights that the engine has had, by version; the caller adds one before it announces it.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        costs: SimulationCosts,
        digests: dict[int, int],
        *,
        max_sequences: int,
        shares_loop: bool,
    ) -> None:
        self._process, self._loop, self._costs = process, process.loop, costs
        self._digests, self._max, self._shares_loop = digests, max_sequences, shares_loop
        self._rows: list[tuple[float, int, _Row]] = []  # by the pass that ends it
        self._waiting: deque[_Row] = deque()
        self._number, self._passes, self._at, self._busy_s = 0, 0.0, 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._driver: asyncio.Task[None] | None = None
        self._slowness = process.slowness
        self.version, self.tokens_generated = -1, 0
        self.versions: list[int] = []  #: those announced, in order

    # -- requests ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        found = [completion async for completion in self.stream(request)]
        return sorted(found, key=lambda each: each.index)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        self._advance()
        one = _SimulatedRequest(request, asyncio.Queue(), self._loop.time())
        lengths = self._costs.lengths(request.seed, request.n)
        for index, length in enumerate(lengths):
            prefix = request.prefixes[index] if index < len(request.prefixes) else None
            self._waiting.append(_Row(one, index, min(length, request.sampling.max_new_tokens), prefix))
        self._busy_s += self._costs.group_s
        self._fill()
        self._go_on()
        try:
            for _ in range(request.n):
                yield await one.finished.get()
        finally:
            self._drop(one)

    def _drop(self, request: _SimulatedRequest) -> None:
        self._advance()
        self._waiting = deque(row for row in self._waiting if row.request is not request)
        self._rows = [each for each in self._rows if each[2].request is not request]
        heapq.heapify(self._rows)
        self._fill()
        self._go_on()

    def interrupt(self) -> None:
        self._advance()
        rows = [*(row for _, _, row in sorted(self._rows, key=lambda each: each[1])), *self._waiting]
        self._rows, self._waiting = [], deque()
        for row in rows:
            whole = self._tokens_of(row) >= row.length
            self._hand_out(row, StopReason.EOS if whole else StopReason.ABORTED)

    # -- weights -----------------------------------------------------------------------------------------------

    def weights_updated(self, version: int) -> None:
        self._advance()
        self.version = version
        self.versions.append(version)
        for _, _, row in self._rows:
            row.segments.append((self._tokens_of(row), version))
        if not self._shares_loop:
            self._busy_s += self._costs.receive_s + self._costs.recompute_s * len(self._rows)
        self._go_on()

    # -- the rest of the protocol --------------------------------------------------------------------------------

    def pause(self) -> None:
        """No-op: whoever trains beside an engine of its own process holds up its loop."""

    def resume(self) -> None:
        """No-op, since `pause` is one."""

    async def drain(self) -> None:
        """No-op, since `pause` is one."""

    async def wait_for_tokens(self) -> None:
        """Lets the driver make one pass."""
        await asyncio.sleep(0)

    async def sleep(self, *, destroy: bool = False) -> None:
        """No-op: no memory is taken."""

    def counters(self) -> dict[str, float]:
        """Empty."""
        return {}

    async def close(self) -> None:
        self._rows, self._waiting = [], deque()
        if self._timer is not None:
            self._timer.cancel()

    def set_slowness(self, factor: float) -> None:
        """Change the factor of the seconds that passes take."""
        self._advance()
        self._slowness = factor
        self._go_on()

    # -- decoding ----------------------------------------------------------------------------------------------

    def _pass_s(self) -> float:
        return self._slowness * (self._costs.pass_s + self._costs.row_s * len(self._rows))

    def _advance(self) -> None:
        """Decode until now, in an engine that decodes on its own."""
        if self._shares_loop:
            return
        room = max(self._loop.time() - self._at, 0.0)
        other = min(room, self._busy_s)
        self._busy_s -= other
        if self._rows:
            self._passes += (room - other) / self._pass_s()
        self._at = self._loop.time()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._rows or not self._process.alive:
            return
        if self._shares_loop:
            if self._driver is None or self._driver.done():
                self._driver = self._process.spawn(self._drive())
            return
        left = self._busy_s + (self._rows[0][0] - self._passes) * self._pass_s()
        self._timer = self._loop.call_later(max(left, 0.0), self._next_end)

    def _next_end(self) -> None:
        self._timer = None
        self._advance()
        if self._rows:
            if self._rows[0][0] - self._passes > _DONE:  # it was slowed down meanwhile
                self._go_on()
                return
            self._passes = max(self._passes, self._rows[0][0])
            self._finish_rows()
        self._go_on()

    async def _drive(self) -> None:
        while self._rows:
            self._loop.spend(self._busy_s + self._pass_s())
            self._busy_s = 0.0
            self._passes += 1
            self.tokens_generated += len(self._rows)
            self._finish_rows()
            await asyncio.sleep(0)

    def _finish_rows(self) -> None:
        while self._rows and self._rows[0][0] <= self._passes + _DONE:
            self._hand_out(heapq.heappop(self._rows)[2], StopReason.EOS)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._rows) < self._max:
            row = self._waiting.popleft()
            begun = 0 if row.prefix is None else len(row.prefix.token_ids)
            row.began, row.end = self._passes - begun, self._passes + max(row.length - begun, 1)
            row.started, row.segments = self._loop.time(), [(begun, self.version)]
            self._number += 1
            heapq.heappush(self._rows, (row.end, self._number, row))

    # -- completions -------------------------------------------------------------------------------------------

    def _tokens_of(self, row: _Row) -> int:
        """Tokens that a completion has, those of its prefix included."""
        if not row.segments:  # it has not started
            return 0 if row.prefix is None else len(row.prefix.token_ids)
        return min(int(self._passes - row.began + _DONE), row.length)

    def _hand_out(self, row: _Row, reason: StopReason) -> None:
        made = self._completion(row, reason)
        if not self._shares_loop:
            self.tokens_generated += len(made.token_ids) - (0 if row.prefix is None else len(row.prefix.token_ids))
        row.request.finished.put_nowait(made)

    def _completion(self, row: _Row, reason: StopReason) -> Completion:
        wanted, count = row.request.wanted, self._tokens_of(row)
        parts = [] if row.prefix is None else [(row.prefix.token_ids, row.prefix.logprobs, row.prefix.versions)]
        for first, last, version in _spans(row.segments, count):
            digest = self._digests.get(version, 0)
            tokens = simulated_tokens(wanted.seed, row.index, np.arange(first, last), digest)
            parts.append((tokens, np.full(last - first, -shown_digest(digest)), np.full(last - first, version)))
        ids, logprobs, versions = zip(*parts, strict=True) if parts else ((), (), ())
        return Completion(
            prompt_ids=np.asarray(wanted.prompt_ids, np.int32),
            token_ids=np.concatenate([*ids, np.zeros(0)]).astype(np.int32),
            logprobs=np.concatenate([*logprobs, np.zeros(0)]).astype(np.float32),
            versions=np.concatenate([*versions, np.zeros(0)]).astype(np.int32),
            kept_logmass=np.zeros(count, np.float32),
            text="",
            stop_reason=reason,
            seed=wanted.seed,
            index=row.index,
            submitted_at=row.request.submitted,
            started_at=row.started,
            finished_at=self._loop.time(),
        )


def _spans(segments: list[tuple[int, int]], count: int) -> Iterator[tuple[int, int, int]]:
    """First and last token (exclusive) of each segment with tokens, and its version."""
    for number, (first, version) in enumerate(segments):
        end = segments[number + 1][0] if number + 1 < len(segments) else count
        if end > first:
            yield first, end, version
