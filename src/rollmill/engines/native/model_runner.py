"""Forward passes: prompts and recomputation, decode steps, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollmill.engines.native.decoder import BucketDecoder, Decoder
from rollmill.engines.native.kv_cache import BucketCache, CacheEntry, CacheFull, KVCache
from rollmill.engines.native.paged_cache import PagedCache, PagedDecoder, PagedPrefillContext
from rollmill.engines.native.prefill import BucketPrefillContext, PrefillChunk, PrefillContext
from rollmill.engines.native.prefix_cache import PrefixCache
from rollmill.engines.native.row_sampler import build_sampling_tensors, next_uniforms, sample_rows
from rollmill.engines.native.sampler import HostSamplerOutput, SamplingTensors
from rollmill.engines.native.sequence import SequenceGroup, SequenceState
from rollmill.models.attention import AttentionContext, build_forward_inputs, use_attention_context
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


class ModelRunner:
    """Runs the model over cache entries.

    Attributes:
        decoder: makes decode steps.
    """

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
        self._places: list[int] = []  # addresses of weights
        self._vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        self._norms = find_norms(model) if is_fp32_on_cpu(model) else []
        #: whether the model has recurrent states, so that completions cannot be cut back
        self.recurrent = bool(recurrent_layers(model))
        #: features of prompts with pictures; None for text models
        self.features = None if picture_processor(model) is None else FeatureCache(model)
        self._fused: FusedLayers | None = None
        self._may_fuse = self.features is None and not record_routing
        self._cache = cache
        captures = self._device.type == "cuda" and not self.recurrent and self.features is None
        name = type(model).__name__
        self._prefill_context: Callable[[list[PrefillChunk[Any]]], PrefillContext[Any]] = BucketPrefillContext
        self.decoder: Decoder
        if isinstance(cache, PagedCache):
            self._prefill_context = partial(PagedPrefillContext, cache)
            self.decoder = PagedDecoder(self._forward, name, cache, self._device, captures=captures, context=context)
        else:
            assert isinstance(cache, BucketCache)
            self.decoder = BucketDecoder(
                self._forward,
                name,
                cache,
                self._device,
                captures=captures,
                last_position=context - 1,
                offsets=None if self.features is None else partial(_picture_offsets, model),
            )
        self.invalidate()

    def weights_changed(self) -> None:
        """Use the model's present weights from now on."""
        if self._fused is not None:
            self._fused.refresh()
        elif self._may_fuse:
            self._may_fuse = False
            self._fused = build_fused_layers(self._model, self._last_position + 1)
        self.follow_weights()

    def follow_weights(self) -> None:
        """Drop captured steps if the weights are elsewhere than before."""
        if self.decoder.captures:
            places = [each.data_ptr() for each in (*self._model.parameters(), *self._model.buffers())]
            if places != self._places:
                self._places = places
                self.decoder.drop_captured()

    def destroy_weights(self) -> None:
        """Free copies of weights, until they change."""
        self._places = []
        if self._fused is not None:
            self._fused.destroy()

    def invalidate(self) -> None:
        """Rows were added or removed, or the cache was emptied."""
        self.decoder.invalidate()
        self._sampled: list[SequenceState] = []  # rows of the present sampling parameters
        self._params: SamplingTensors | None = None

    # -- prompts -----------------------------------------------------------------------------------------------

    def prefill(self, groups: Iterable[SequenceGroup], room: float = math.inf) -> bool:
        """Process waiting prompts in order of arrival, up to the token budget of one step; False if there were none.

        `room` is how many completions may start: prompts that none of them could use yet wait, and take no memory. So
        do prompts for which the cache has no room.
        """
        budget = self._prefill_tokens
        work: list[tuple[SequenceGroup, PrefillChunk[CacheEntry]]] = []
        for group in groups:
            prompt = group.request.prompt_ids
            if budget <= 0 or room <= 0:
                break
            room -= len(group.waiting)
            if group.is_prefilled:
                continue
            if group.entry is None:
                while group.entry is None:
                    try:
                        group.entry = self._cache.prompt(len(prompt))
                    except CacheFull:  # kept turns give way
                        if not self._prefixes.drop_oldest():
                            break
                if group.entry is None:
                    break
                if (known := self._prefixes.take(group.request, group.entry)) is not None:
                    group.prefilled = known.length
                    group.routing = list(known.routing)  # it grows, and equal conversations share the kept one
            take = min(budget, len(prompt) - group.prefilled)
            if (pictures := group.request.pictures) is not None:
                take = pictures.whole_blocks(group.prefilled, take)
            tokens = list(prompt[group.prefilled : group.prefilled + take])
            work.append((group, PrefillChunk(group.entry, group.prefilled, tokens, group.request.pictures)))
            budget -= take
        if not work:
            return False
        logits_SV, routing = self._extend([segment for _, segment in work])
        for (group, segment), logits_V, experts in zip(work, logits_SV, routing, strict=True):
            group.prefilled += len(segment.tokens)
            group.routing.extend(experts)
            if group.is_prefilled:
                group.logits_V = logits_V
        return True

    def prefill_all(self, groups: list[SequenceGroup]) -> None:
        """Process whole prompts, in as many passes as the budget needs."""
        while not all(group.is_prefilled for group in groups):
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
        pending: list[tuple[SequenceState, PrefillChunk[CacheEntry]]] = []
        tokens = 0

        def extend() -> None:
            _, routing = self._extend([segment for _, segment in pending])
            for (row, segment), experts in zip(pending, routing, strict=True):
                row.fed(segment.start, experts)

        for row in rows:
            assert row.entry is not None
            cached = row.tokens[:-1]
            self._cache.reserve([row.entry], [len(cached)])
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
            self._cache.reserve([row.entry], [len(own)])
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
        self.decoder.lengths_changed()

    @property
    def max_logits(self) -> int:
        """Most tokens for `feed` in one pass: [P, V] stays below 256 MiB in float32."""
        return max(16, min(self._prefill_tokens, (1 << 26) // self._vocabulary))

    def _extend(
        self, segments: list[PrefillChunk[CacheEntry]], every: bool = False
    ) -> tuple[Tensor, list[RoutingArray]]:
        """Append tokens to entries; logits [S, V] after each segment's last token, or [T, V] after every token.

        Also each segment's experts, [tokens, L, k]; empty unless recorded.
        """
        context = self._prefill_context(segments)
        flat = [token for segment in segments for token in segment.tokens]
        columns = [np.array([flat]), np.array([context.positions()]), np.array(context.last_rows())]
        tokens, positions, last = to_device(columns, self._device)
        logits, routing = self._forward(context, tokens, positions, 0 if every else last)
        for segment in segments:
            segment.entry.length = segment.start + len(segment.tokens)
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        return logits, np.split(_on_host(routing), ends[:-1])

    # -- decoding ----------------------------------------------------------------------------------------------

    def decode(self, rows: list[SequenceState]) -> tuple[Tensor, Tensor]:
        """Feed each row's last token. May sort `rows` in place.

        Returns:
            logits [B, V], and the uniform numbers [B] by which `sample` draws the next tokens.
        """
        logits, routing, uniform_B = self.decoder.step(rows)
        if routing is not None:
            for row, experts in zip(rows, _on_host(routing)[:, None], strict=True):
                assert row.entry is not None
                row.fed(row.entry.length, experts)
        for row in rows:
            assert row.entry is not None
            row.entry.length += 1
        return logits, uniform_B

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
        if self._params is None or rows != self._sampled:
            self._sampled, self._params = list(rows), build_sampling_tensors(rows, self._device)
        return self._params

    def _forward(
        self, context: Any, tokens: Tensor, positions: Tensor, keep: Tensor | int
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


def _picture_offsets(model: nn.Module, rows: list[SequenceState]) -> Tensor:
    """Offsets [B] from the index of a row's next token to its position."""
    prompts = [row.group.request.pictures for row in rows]
    found = {each.key: compute_positions(model, each) for each in prompts if each is not None}
    offsets = [0 if each is None else (found[each.key] or (None, 0))[1] for each in prompts]
    return torch.tensor(offsets, device=next(model.parameters()).device)


def _forward_language(
    model: nn.Module,
    cache: FeatureCache,
    context: AttentionContext,
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
