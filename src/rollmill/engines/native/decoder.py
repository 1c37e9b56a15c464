"""Decode steps: every running row adds one token. On a GPU, steps of unchanging shapes are captured and replayed.

Shapes: B rows, V vocabulary, L layers, k experts of a token.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from rollmill.engines.native.decode import DecodeContext
from rollmill.engines.native.kv_cache import BucketCache, BucketEntry
from rollmill.engines.native.row_sampler import next_uniforms
from rollmill.engines.native.sequence import SequenceState
from rollmill.models.attention import AttentionContext
from rollmill.models.transfers import to_device

log = logging.getLogger(__name__)

DecodeOutput = tuple[Tensor, Tensor | None]
"""Logits [B, V] and, if recorded, experts [B, L, k]."""
WARMUP_STEPS = 2  # libraries set up their workspaces outside the capture
CAPTURE_AFTER = 8
"""Decode steps of the same shapes before one is captured. A capture costs about as much as replays save in so many
steps, so shapes that change more often are decoded without."""
_capturing = threading.Lock()  # torch captures on one stream, and a reward model's engine may run in another thread


class StepContext(AttentionContext, Protocol):
    """Attention context of steps with the same shapes, whose tensors change in place."""

    positions_B: Tensor


Forward = Callable[[Any, Tensor, Tensor, int], DecodeOutput]
"""The model on (context, tokens [1, B], positions [1, B], 0)."""


class GraphedStep:
    """One decode step captured as a CUDA graph: one launch instead of some thirty per layer.

    The rows of its context have fixed shapes. The graph reads positions and lengths from the context's tensors, which
    change in place between replays. Replaying a step twice without such a change writes the same keys and values to the
    same places, so warming up changes nothing.

    Args:
        beside: a captured step that is never replayed at the same time, so that both use the same memory.
    """

    def __init__(self, forward: Forward, context: StepContext, beside: GraphedStep | None = None) -> None:
        positions = context.positions_B[None]
        self._tokens = torch.zeros_like(positions)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                forward(context, self._tokens, positions, 0)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        with _capturing, torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = forward(context, self._tokens, positions, 0)

    def __call__(self, tokens_1B: Tensor) -> DecodeOutput:
        """Replay the step; return logits and experts, which the next call overwrites."""
        self._tokens.copy_(tokens_1B)
        self._graph.replay()
        return self._output


@dataclass(slots=True)
class DecodeCounts:
    """Decode steps since the engine was created, those of them that replayed a captured one, and captures."""

    decode_steps: int = 0
    decode_replays: int = 0
    decode_captures: int = 0


class Decoder(ABC):
    """Makes the decode steps of one layout of the cache.

    Args:
        model: its name, for a warning.
        captures: whether steps are captured; off after the first that cannot be.

    Attributes:
        slack: share of finished rows that may stay in the batch.
    """

    slack = 0.0

    def __init__(self, forward: Forward, model: str, device: torch.device, captures: bool) -> None:
        self.counts = DecodeCounts()
        self.captures = captures
        self._forward, self._model, self._device = forward, model, device

    @abstractmethod
    def step(self, rows: list[SequenceState]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Feed each row's last token. May sort `rows` in place.

        Returns:
            logits [B, V], experts [B, L, k] if recorded, and the uniform numbers [B] that draw the next tokens.
        """

    @abstractmethod
    def invalidate(self) -> None:
        """Drop what depends on the rows, since some were added or removed."""

    @abstractmethod
    def lengths_changed(self) -> None:
        """Follow changes of the lengths of the rows' entries."""

    @abstractmethod
    def drop_captured(self) -> None:
        """Drop captured steps, which read weights and cache by address."""

    def run(self, context: StepContext, graph: GraphedStep | None, tokens: Tensor, positions: Tensor) -> DecodeOutput:
        """Replay a step, or make one."""
        self.counts.decode_steps += 1
        if graph is None:
            return self._forward(context, tokens, positions, 0)
        self.counts.decode_replays += 1
        return graph(tokens)

    def capture(self, context: StepContext, beside: GraphedStep | None = None) -> GraphedStep | None:
        """Capture the step of a context; None if that fails, and from then on nothing is captured."""
        self.counts.decode_captures += 1
        try:
            return GraphedStep(self._forward, context, beside)
        except RuntimeError as error:  # a model that waits for the device inside its forward pass
            text = "decode steps of %s cannot be captured, so each kernel is launched by itself: %s"
            log.warning(text, self._model, error)
            self.captures = False
            return None


class BucketDecoder(Decoder):
    """Decode steps over buckets: a context serves until rows come or go, or outgrow their bucket.

    Args:
        last_position: of the model.
        offsets: from the index of a row's next token to its position, [B]; None: there is none.
    """

    def __init__(
        self,
        forward: Forward,
        model: str,
        cache: BucketCache,
        device: torch.device,
        *,
        captures: bool,
        last_position: int,
        offsets: Callable[[list[SequenceState]], Tensor] | None = None,
    ) -> None:
        super().__init__(forward, model, device, captures)
        self.slack = 0.25 if captures else 0.0  # a captured step is worth more than empty rows
        self._cache, self._last_position, self._offsets = cache, last_position, offsets
        self._context: DecodeContext | None = None
        self.invalidate()

    def invalidate(self) -> None:
        if self._context is not None:
            self._context.write_back_states()
        self._context = None
        self._graph: GraphedStep | None = None
        self._unchanged = 0  # steps of the present context
        self._moves = -1

    def lengths_changed(self) -> None:
        if self._context is not None:
            self._context.follow()

    def drop_captured(self) -> None:
        self.invalidate()

    def step(self, rows: list[SequenceState]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Feed each row's last token, after it has sorted `rows` into the order of the buckets."""
        context = self._context
        if context is None or self._moves != self._cache.moves() or context.full():
            context = self._prepare(rows)
        if self.captures and self._graph is None and self._unchanged >= CAPTURE_AFTER:
            self._graph = self.capture(context)
            if self._graph is None:
                self.slack = 0.0
                context = self._prepare(rows)
        last = np.array([[row.tokens[-1] for row in rows]], np.int64)
        tokens, uniform_B = to_device([last, next_uniforms(rows)], self._device)
        positions = context.positions_B[None]
        if self._offsets_B is not None:
            positions = positions + self._offsets_B
        logits, routing = self.run(context, self._graph, tokens, positions)
        self._unchanged += 1
        context.advance()
        return logits, routing, uniform_B

    def _prepare(self, rows: list[SequenceState]) -> DecodeContext:
        """Build a context for these rows, sorted."""
        self.invalidate()
        for bucket in self._cache.completion_buckets():
            full = [entry for entry in bucket.entries if entry.length >= bucket.capacity]
            if full:
                self._cache.grow(full)
        buckets = self._cache.completion_buckets()
        first = {id(bucket): sum(len(b.entries) for b in buckets[:i]) for i, bucket in enumerate(buckets)}

        def place(row: SequenceState) -> int:
            entry = cast(BucketEntry, row.entry)
            return first[id(entry.bucket)] + entry.index

        rows.sort(key=place)
        self._offsets_B = None if self._offsets is None else self._offsets(rows)
        entries = [cast(BucketEntry, row.entry) for row in rows]
        self._context = DecodeContext(entries, self._device, self._last_position, exact=not self.captures)
        self._moves = self._cache.moves()
        return self._context
