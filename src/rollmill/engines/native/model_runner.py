"""Forward passes: prompts and recomputation through PrefillContext, decode steps through DecodeContext, sampling."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollmill.engines.native.decode import DecodeContext
from rollmill.engines.native.kv_cache import KVCache
from rollmill.engines.native.prefill import PrefillChunk, PrefillContext
from rollmill.engines.native.prefix_cache import PrefixCache
from rollmill.engines.native.row_sampler import build_sampling_tensors, next_uniforms, sample_rows
from rollmill.engines.native.sampler import HostSamplerOutput, SamplingTensors
from rollmill.engines.native.sequence import SequenceGroup, SequenceState
from rollmill.models.attention import build_forward_inputs, use_attention_context
from rollmill.models.cpu.norms import find_norms, is_fp32_on_cpu, use_fast_norms
from rollmill.models.fused_layers import FusedLayers, build_fused_layers
from rollmill.models.recurrent import recurrent_layers
from rollmill.models.routing import capture_routing
from rollmill.models.transfers import to_device
from rollmill.models.vision import (
    FeatureCache,
    PictureSpan,
    build_picture_inputs,
    compute_positions,
    final_softcap,
    picture_processor,
    text_model,
)
from rollmill.types import RoutingArray

log = logging.getLogger(__name__)

DecodeOutput = tuple[Tensor, Tensor | None]
"""Logits [B, V] and, if recorded, experts [B, L, k]."""
WARMUP_STEPS = 2  # libraries set up their workspaces outside the capture
CAPTURE_AFTER = 8
"""Decode steps with the same rows before one is captured. A capture costs about as much as replays save in so many
steps, so rows that change more often, as in conversations, are decoded without."""
_capturing = threading.Lock()  # torch captures on one stream, and a reward model's engine may run in another thread


class GraphedStep:
    """One decode step captured as a CUDA graph: one launch instead of some thirty per layer.

    The rows of its context have fixed shapes (`exact=False`). The graph reads positions and lengths from the context's
    tensors, which `DecodeContext.advance` changes in place between replays. Replaying a step twice without advancing
    writes the same keys and values to the same places, so warming up changes nothing.
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


class ModelRunner:
    """Runs the model over cache entries. Rows keep the order of the cache's buckets between changes."""

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        prefixes: PrefixCache,
        prefill_tokens: int,
        context: int,
        record_routing: bool = False,
    ) -> None:
        self._prefixes = prefixes
        self._model, self._record_routing = model, record_routing
        self._device = next(model.parameters()).device
        self._prefill_tokens = prefill_tokens
        self._last_position = context - 1
        self._vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        self._norms = find_norms(model) if is_fp32_on_cpu(model) else []
        #: whether the model has recurrent states, so that completions cannot be cut back
        self.recurrent = bool(recurrent_layers(model))
        #: features of prompts with pictures; None for text models
        self.features = None if picture_processor(model) is None else FeatureCache(model)
        self._graphs = self._device.type == "cuda" and not self.recurrent and self.features is None
        self._offsets_B: Tensor | None = None  # from index to position of the rows whose prompts have pictures
        #: share of finished rows that may stay in the batch: a captured step is worth more than empty rows
        self.slack = 0.25 if self._graphs else 0.0
        self.counts = DecodeCounts()
        self._unchanged = 0  # decode steps of the present context
        self._fused: FusedLayers | None = None
        self._may_fuse = self.features is None and not record_routing
        self._context: DecodeContext | None = None
        self.reset(cache)

    def reset(self, cache: KVCache) -> None:
        """Switch to another cache; everything in the old one is dropped."""
        self._cache = cache
        self.invalidate()

    def weights_changed(self) -> None:
        """Use the model's present weights from now on."""
        if self._fused is not None:
            self._fused.refresh()
        elif self._may_fuse:
            self._may_fuse = False
            self._fused = build_fused_layers(self._model, self._last_position + 1)

    def destroy_weights(self) -> None:
        """Free copies of weights, until they change."""
        if self._fused is not None:
            self._fused.destroy()

    def invalidate(self) -> None:
        """Drop the decode context, since rows were added or removed; the next step builds it again."""
        if self._context is not None:
            self._context.write_back_states()
        self._context = None
        self._graph: GraphedStep | None = None
        self._moves = -1
        self._params: dict[int, SamplingTensors] = {}

    # -- prompts -----------------------------------------------------------------------------------------------

    def prefill(self, groups: Iterable[SequenceGroup], room: float = math.inf) -> None:
        """Process waiting prompts in order of arrival, up to the token budget of one step.

        `room` is how many completions may start: prompts that none of them could use yet wait, and take no memory.
        """
        budget = self._prefill_tokens
        work: list[tuple[SequenceGroup, PrefillChunk]] = []
        for group in groups:
            prompt = group.request.prompt_ids
            if budget <= 0 or room <= 0:
                break
            room -= len(group.waiting)
            if group.logits_V is not None:
                continue
            if group.entry is None:
                group.entry = self._cache.prompt(len(prompt))
                if (known := self._prefixes.take(group.request)) is not None:
                    known.copy_into(group.entry)
                    group.prefilled = known.length
                    group.routing = list(known.routing)  # it grows, and equal conversations share the kept one
            take = min(budget, len(prompt) - group.prefilled)
            if (pictures := group.request.pictures) is not None:
                take = pictures.whole_blocks(group.prefilled, take)
            tokens = list(prompt[group.prefilled : group.prefilled + take])
            work.append((group, PrefillChunk(group.entry, group.prefilled, tokens, group.request.pictures)))
            budget -= take
        if not work:
            return
        logits_SV, routing = self._extend([segment for _, segment in work])
        for (group, segment), logits_V, experts in zip(work, logits_SV, routing, strict=True):
            group.prefilled += len(segment.tokens)
            group.routing.extend(experts)
            if group.prefilled == len(group.request.prompt_ids):
                group.logits_V = logits_V

    def prefill_all(self, groups: list[SequenceGroup]) -> None:
        """Process whole prompts, in as many passes as the budget needs."""
        while any(group.logits_V is None for group in groups):
            self.prefill(groups)

    def allocate(self, rows: list[SequenceState]) -> None:
        """Add cache entries for rows, below their prompts."""
        parents = []
        for row in rows:
            assert row.group.entry is not None
            parents.append(row.group.entry)
        for row, parent, entry in zip(rows, parents, self._cache.completions(parents), strict=True):
            row.entry, entry.states = entry, dict(parent.states)
            if row.prompt_routing is None:
                row.prompt_routing = row.group.routing
        self.invalidate()

    def restore(self, rows: list[SequenceState]) -> None:
        """Recompute keys and values of running rows: all their tokens but the last, which the next step feeds."""
        self.allocate(rows)
        pending: list[tuple[SequenceState, PrefillChunk]] = []
        tokens = 0

        def extend() -> None:
            _, routing = self._extend([segment for _, segment in pending])
            for (row, segment), experts in zip(pending, routing, strict=True):
                row.fed(segment.start, experts)

        for row in rows:
            assert row.entry is not None
            cached = row.tokens[:-1]
            while row.entry.bucket.capacity < len(cached):
                self._cache.grow([row.entry])
            for first in range(0, len(cached), self._prefill_tokens):  # a full piece ends the pass
                piece = cached[first : first + self._prefill_tokens]
                pending.append((row, PrefillChunk(row.entry, first, piece, row.group.request.pictures)))
                tokens += len(piece)
                if tokens >= self._prefill_tokens:
                    extend()
                    pending, tokens = [], 0
        if pending:
            extend()

    def extend(self, rows: list[SequenceState], tokens: list[list[int]]) -> Tensor:
        """Append tokens to the rows' entries; return the logits after every one of them, [P, V], row after row."""
        segments = []
        for row, own in zip(rows, tokens, strict=True):
            assert row.entry is not None
            while row.entry.bucket.capacity < row.entry.length + len(own):
                self._cache.grow([row.entry])
            segments.append(PrefillChunk(row.entry, row.entry.length, own, row.group.request.pictures))
        logits, routing = self._extend(segments, every=True)
        for row, segment, experts in zip(rows, segments, routing, strict=True):
            row.fed(segment.start, experts)
        return logits

    def truncate(self, rows: list[SequenceState]) -> None:
        """Cut entries back to the rows' tokens but the last; later positions are overwritten."""
        for row in rows:
            assert row.entry is not None
            row.entry.length = len(row.tokens) - 1
            del row.routing[row.entry.length :]
        if self._context is not None:
            self._context.follow()

    @property
    def max_logits(self) -> int:
        """Most tokens for `feed` in one pass: [P, V] stays below 256 MiB in float32."""
        return max(16, min(self._prefill_tokens, (1 << 26) // self._vocabulary))

    def _extend(self, segments: list[PrefillChunk], every: bool = False) -> tuple[Tensor, list[RoutingArray]]:
        """Append tokens to entries; logits [S, V] after each segment's last token, or [T, V] after every token.

        Also each segment's experts, [tokens, L, k]; empty unless recorded.
        """
        context = PrefillContext(segments)
        flat = [token for segment in segments for token in segment.tokens]
        logits, routing = self._forward(
            context,
            torch.tensor([flat], device=self._device),
            torch.tensor([context.positions()], device=self._device),
            0 if every else torch.tensor(context.last_rows(), device=self._device),
        )
        for segment in segments:
            segment.entry.length = segment.start + len(segment.tokens)
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        return logits, np.split(_on_host(routing), ends[:-1])

    # -- decoding ----------------------------------------------------------------------------------------------

    def decode(self, rows: list[SequenceState]) -> tuple[Tensor, Tensor]:
        """Feed each row's last token. Sorts `rows` in place into the order of the buckets.

        Returns:
            logits [B, V], and the uniform numbers [B] by which `sample` draws the next tokens.
        """
        context = self._context
        if context is None or self._moves != self._cache.moves() or context.full():
            context = self._prepare(rows)
        if self._graphs and self._graph is None and self._unchanged >= CAPTURE_AFTER:
            context = self._capture(context, rows)
        last = np.array([[row.tokens[-1] for row in rows]], np.int64)
        tokens, uniform_B = to_device([last, next_uniforms(rows)], self._device)
        self._unchanged += 1
        self.counts.decode_steps += 1
        if self._graph is not None:
            self.counts.decode_replays += 1
            logits, routing = self._graph(tokens)
        else:
            positions = context.positions_B[None]
            if self._offsets_B is not None:
                positions = positions + self._offsets_B
            logits, routing = self._forward(context, tokens, positions, 0)
        context.advance()
        if routing is not None:
            for row, experts in zip(rows, _on_host(routing)[:, None], strict=True):
                assert row.entry is not None
                row.fed(row.entry.length, experts)
        for row in rows:
            assert row.entry is not None
            row.entry.length += 1
        return logits, uniform_B

    def _prepare(self, rows: list[SequenceState]) -> DecodeContext:
        """Build a context for these rows."""
        if self._context is not None:
            self._context.write_back_states()
        self._context, self._graph, self._unchanged = self._arrange(rows), None, 0
        self._moves = self._cache.moves()
        return self._context

    def _capture(self, context: DecodeContext, rows: list[SequenceState]) -> DecodeContext:
        """Capture the step of a context; if that fails, return one that needs no capture, now and from then on."""
        self.counts.decode_captures += 1
        try:
            self._graph = GraphedStep(self._forward, context)
        except RuntimeError as error:  # a model that waits for the device inside its forward pass
            text = "decode steps of %s cannot be captured, so each kernel is launched by itself: %s"
            log.warning(text, type(self._model).__name__, error)
            self._graphs, self.slack = False, 0.0
            return self._prepare(rows)
        return context

    def _arrange(self, rows: list[SequenceState]) -> DecodeContext:
        self._params.clear()
        for bucket in self._cache.completion_buckets():
            full = [entry for entry in bucket.entries if entry.length >= bucket.capacity]
            if full:
                self._cache.grow(full)
        buckets = self._cache.completion_buckets()
        first = {id(bucket): sum(len(b.entries) for b in buckets[:i]) for i, bucket in enumerate(buckets)}

        def place(row: SequenceState) -> int:
            assert row.entry is not None
            return first[id(row.entry.bucket)] + row.entry.index

        rows.sort(key=place)
        self._offsets_B = None if self.features is None else _picture_offsets(self._model, rows, self._device)
        entries = [row.entry for row in rows if row.entry is not None]
        return DecodeContext(entries, self._device, self._last_position, exact=not self._graphs)

    def sample(
        self, rows: list[SequenceState], logits_BV: Tensor, top: int = 0, uniform_B: Tensor | None = None
    ) -> HostSamplerOutput:
        """Sample a token for each row; see `sample_rows`.

        Args:
            uniform_B: the rows' uniform numbers, if they are on the device already.
        """
        if uniform_B is None:
            [uniform_B] = to_device([next_uniforms(rows)], self._device)
        return sample_rows(rows, logits_BV, self._sampling(rows), uniform_B, top)

    def _sampling(self, rows: list[SequenceState]) -> SamplingTensors:
        if self._context is None or len(rows) != len(self._context.positions_B):
            return build_sampling_tensors(rows, self._device)
        key = id(self._context)
        if key not in self._params:
            self._params = {key: build_sampling_tensors(rows, self._device)}
        return self._params[key]

    def _forward(
        self, context: PrefillContext | DecodeContext, tokens: Tensor, positions: Tensor, keep: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the kept rows (0: all), and the experts of all rows [T, L, k] if recorded."""
        context.begin()
        if self._fused is not None:
            return self._fused.forward(context, tokens, positions, keep), None
        recording = capture_routing(self._model) if self._record_routing else nullcontext()
        if self.features is not None:
            with use_fast_norms(self._norms):
                return _forward_language(self._model, self.features, context, tokens, positions, keep), None
        with use_attention_context(self._model, context), use_fast_norms(self._norms), recording as recorded:
            inputs = build_forward_inputs(self._model, tokens, positions)
            output: Any = self._model(**inputs, logits_to_keep=keep)
            routing = None if recorded is None else recorded.take()
        return output.logits[0], routing


def _picture_offsets(model: nn.Module, rows: list[SequenceState], device: torch.device) -> Tensor:
    """Offsets [B] from the index of a row's next token to its position."""
    prompts = [row.group.request.pictures for row in rows]
    found = {each.key: compute_positions(model, each) for each in prompts if each is not None}
    return torch.tensor([0 if each is None else (found[each.key] or (None, 0))[1] for each in prompts], device=device)


def _forward_language(
    model: nn.Module,
    cache: FeatureCache,
    context: PrefillContext | DecodeContext,
    tokens: Tensor,
    positions: Tensor,
    keep: Tensor | int,
) -> Tensor:
    """Logits of the kept rows (0: all) of a vision-language model; features come from the cache."""
    network: Any = text_model(model)
    inputs = build_forward_inputs(network, tokens, positions)
    spans: list[PictureSpan] = context.picture_spans() if isinstance(context, PrefillContext) else []
    if spans:
        needed = {part.key: part for span in spans for _, part in span.parts()}
        features = {key: cache(part) for key, part in needed.items()}
        inputs = build_picture_inputs(model, inputs, spans, features)
    with use_attention_context(network, context):
        hidden_Td: Tensor = network(**inputs).last_hidden_state[0]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    logits: Tensor = head(hidden_Td if isinstance(keep, int) else hidden_Td.index_select(0, keep))
    softcap = final_softcap(model)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _on_host(routing: Tensor | None) -> RoutingArray:
    """Experts as stored: uint8, or uint16 for more than 256 experts; empty if nothing was recorded."""
    if routing is None:
        return np.zeros((0, 0, 0), np.uint8)
    array: RoutingArray = routing.cpu().numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array
