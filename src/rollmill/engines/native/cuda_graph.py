"""Decode steps as captured CUDA graphs: one launch instead of some thirty per layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rollmill.engines.native.decode import DecodeContext

DecodeOutput = tuple[Tensor, Tensor | None]
"""Logits [B, V] and, where they are recorded, experts [B, L, k]."""
WARMUP_STEPS = 2  # libraries set up their workspaces outside the capture
_capturing = threading.Lock()  # torch captures on one stream, and a judge's engine may run in another thread


class GraphedStep:
    """One decode step over the rows of a context with fixed shapes (`exact=False`), captured once and replayed.

    The graph reads positions and lengths from the context's tensors, which `DecodeContext.advance` changes in place
    between replays. Replaying a step twice without advancing writes the same keys and values to the same places, so
    warming up changes nothing.
    """

    def __init__(
        self, forward: Callable[[DecodeContext, Tensor, Tensor, int], DecodeOutput], context: DecodeContext
    ) -> None:
        assert not context.exact
        self._tokens = torch.zeros(1, len(context.positions_B), dtype=torch.int64, device=context.device)
        positions = context.positions_B[None]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                context.forget_masks()
                forward(context, self._tokens, positions, 0)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        context.forget_masks()
        with _capturing, torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = forward(context, self._tokens, positions, 0)

    def __call__(self, tokens_1B: Tensor) -> DecodeOutput:
        """Logits and experts of the step; overwritten by the next call."""
        self._tokens.copy_(tokens_1B)
        self._graph.replay()
        return self._output
