"""The step of the native engine: which completions run, what one pass of the model does, and where their state lies.

One step prefills waiting prompts (up to `prefill_tokens`) and starts completions, then makes one pass that verifies
drafts; without drafts, it verifies n-gram guesses and decodes one token for every other running row. State lives on
SequenceGroup and SequenceState; the cache and the sampler know nothing of requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from rollmill.engines.base import SampledToken
from rollmill.engines.native.draft_verifier import DraftVerifier
from rollmill.engines.native.kv_cache import CacheFull
from rollmill.engines.native.model_runner import ModelRunner
from rollmill.engines.native.paged_cache import build_cache
from rollmill.engines.native.prefix_cache import PrefixCache
from rollmill.engines.native.sequence import SequenceGroup, SequenceState
from rollmill.engines.native.weights import EngineWeights
from rollmill.errors import EngineError
from rollmill.types import StopReason


def emit_tokens(
    rows: Sequence[SequenceState],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    kept: Sequence[float],
    logits_BV: Tensor,
) -> None:
    """Call each request's token callback with the tokens sampled for its running rows."""
    listening = [i for i, row in enumerate(rows) if row.stop_reason is None and row.group.request.on_token is not None]
    tops = _tops(rows, [i for i in listening if rows[i].group.request.top], logits_BV)
    for i in listening:
        on_token = rows[i].group.request.on_token
        assert on_token is not None
        on_token(SampledToken(rows[i].index, tokens[i], logprobs[i] + kept[i], tops.get(i, ())))


def _tops(
    rows: Sequence[SequenceState], indices: list[int], logits_BV: Tensor
) -> dict[int, tuple[tuple[int, float], ...]]:
    """The most probable tokens of the rows `indices`, by row."""
    if not indices:
        return {}
    requests = [rows[i].group.request for i in indices]
    scale_A = torch.tensor([request.sampling.temperature or 1.0 for request in requests], device=logits_BV.device)
    logprobs_AV = torch.log_softmax(logits_BV[indices].float() / scale_A[:, None], dim=-1)
    most = min(max(request.top for request in requests), logprobs_AV.shape[1])
    values_AK, ids_AK = logprobs_AV.topk(most, dim=-1)
    pairs = zip(indices, requests, ids_AK.tolist(), values_AK.tolist(), strict=True)
    return {i: tuple(zip(ids, values, strict=True))[: request.top] for i, request, ids, values in pairs}


class EngineCore:
    """Continuous batching of sequence groups, step by step, with the arguments of NativeEngine."""

    def __init__(
        self,
        model: nn.Module,
        *,
        context: int,
        dtype: torch.dtype,
        max_sequences: int,
        prefill_tokens: int,
        keep: bool,
        record_routing: bool,
        prefix_cache_bytes: int,
        int8: bool = False,
        cache_gb: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.version = 0
        self.tokens_generated = 0
        self.preemptions = 0  #: completions that gave their memory to others, and were continued later
        self.weights = EngineWeights(model, dtype, int8=int8, device=device)  #: the weights that it decodes with
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self._keep = keep
        self._cache_gb = cache_gb
        self._cache = build_cache(model, dtype, cache_gb, next(self.weights.model.parameters()).device)
        self.prefixes = PrefixCache(self._cache, prefix_cache_bytes)
        self._runner = ModelRunner(
            self.weights.model, self._cache, self.prefixes, prefill_tokens, context, record_routing
        )
        self.decode_counts = self._runner.decoder.counts
        self.drafting = DraftVerifier(self._runner)
        self.expected = 0  #: conversations that had a turn finished, and may ask for the next one
        self._queue: deque[SequenceGroup] = deque()  # not all of their completions have started
        self._rows: list[SequenceState] = []
        self._started = 0  # completions so far
        self._short = False  # of memory, until a completion ends
        self._stale = True  # cached keys and values, and a cast of the weights, belong to an older version
        self._lost = False  # there are no cached keys and values

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a completion is running or queued."""
        return bool(self._queue or self._rows)

    @property
    def is_decoding(self) -> bool:
        """True while a completion is running."""
        return bool(self._rows)

    @property
    def is_recurrent(self) -> bool:
        """True if the model has recurrent layers, whose state cannot go back to before a rejected draft."""
        return bool(self._runner.recurrent)

    def add(self, group: SequenceGroup) -> None:
        """Queue the completions of a request."""
        self._queue.append(group)
        self.expected = max(0, self.expected - 1)

    def abort(self, group: SequenceGroup) -> None:
        """Drop the unfinished completions of a request (none, if it ended normally)."""
        if group.unfinished == 0:
            return
        if group in self._queue:
            self._queue.remove(group)
        for row in self._rows:
            if row.group is group and row.stop_reason is None:
                row.stop_reason = StopReason.ABORTED
        group.waiting.clear()
        group.unfinished = 0
        self._short = False
        self._remove_finished()
        self._cache.remove(group.prompts())

    def interrupt(self) -> None:
        """Hand out all unfinished completions as they are, as aborted."""
        for group in [*{row.group: None for row in self._rows}, *self._queue]:
            unfinished = [row for row in self._rows if row.group is group and row.stop_reason is None]
            for row in [*unfinished, *group.waiting]:
                row.stop_reason = StopReason.ABORTED
                group.results.put_nowait(row.completion())
            self.abort(group)

    def fail(self, error: BaseException) -> None:
        """Give every request this error instead of its completions, and drop all state."""
        groups = {row.group for row in self._rows} | set(self._queue)
        self._queue.clear()
        self._rows.clear()
        for group in groups:
            group.unfinished = 0
            group.results.put_nowait(error)
        self._drop_cache()

    def weights_updated(self, version: int) -> None:
        """Switch to the new weights at the next step; later tokens carry `version`."""
        self.version = version
        self.weights.updated()
        self._stale = True

    # -- memory ------------------------------------------------------------------------------------------------

    def destroy_weights(self) -> None:
        """Free the cast weights; the next step casts the trained parameters again."""
        self.weights.destroy()
        self._runner.destroy_weights()
        self._stale = True

    def cache_bytes(self) -> int:
        """Bytes of the KV cache, in use or reserved."""
        return self._cache.bytes()

    @property
    def cache_peak(self) -> int:
        """Most bytes of the KV cache that were in use; 0 if it has no limit and lies on a CPU."""
        return self._cache.peak

    def destroy_cache(self) -> None:
        """Free the KV cache; running completions are recomputed."""
        self._remove_finished()
        self._drop_cache()
        self._stale = self._lost = True

    def _drop_cache(self) -> None:
        self.prefixes.clear()
        self._forget_entries()
        self._cache.destroy()
        self._runner.invalidate()
        self._runner.decoder.drop_captured()

    @property
    def cached_entries(self) -> int:
        """Number of prompts and completions with keys and values in the cache."""
        return self._cache.entries()

    def load(self) -> tuple[int, int]:
        """Return the number of tokens that running completions attend to, and of prompt tokens waiting for prefill."""
        attended = sum(row.entry.offset + row.entry.length for row in self._rows if row.entry is not None)
        return attended, sum(len(group.request.prompt_ids) - group.prefilled for group in self._queue)

    # -- one step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Prefill, start, decode and return finished completions; called by the driver."""
        if self._stale:
            self._switch_weights()
        elif not self._rows:
            self._runner.follow_weights()
        groups: Iterable[SequenceGroup] = () if self._short and self._rows else self._queue
        while True:
            prefilled = self._runner.prefill(groups, self._max_sequences - len(self._rows))
            if self._start() or prefilled or self._rows or not self._queue:
                break
            self._give_up_memory(self._queue[0])  # nothing runs, and the first one has no room
            groups = list(self._queue)[:1]  # prompts of others would take the memory again
        if drafted := self._with_room([row for row in self._rows if row.has_draft]):
            self._verify_drafts(drafted, self.drafting.drafts)
            return
        guessed = self._with_room([row for row in self._rows if row.propose()])
        others = len(self._rows) - len(guessed)
        if guessed:
            self._verify_drafts(guessed, self.drafting.verify_ngram_drafts)
        if others and self._with_room(self._rows, tokens=1):
            self._append_tokens(self._rows, *self._runner.decode(self._rows))

    def _with_room(self, rows: list[SequenceState], tokens: int | None = None) -> list[SequenceState]:
        """Make room for so many more tokens, or for the rows' drafts; return those of the rows that still run."""
        while rows and self._cache.limit is not None:
            more = [row.draft_window if tokens is None else tokens for row in rows]
            try:
                self._cache.reserve([row.entry for row in rows if row.entry is not None], more)
                break
            except CacheFull:
                self._give_up_memory()
                rows = [row for row in self._rows if row in rows]
        return rows

    def _switch_weights(self) -> None:
        """Switch to new weights. Prompts are prefilled again for completions that have not started."""
        self._remove_finished()
        self.prefixes.clear()
        self.weights.refresh()
        self._runner.weights_changed()
        if self._runner.features is not None:
            self._runner.features.clear()
        self._runner.invalidate()
        if self._keep and not self._lost:
            self._keep_running()
        else:
            self._recompute()
        self._stale = self._lost = False

    def _keep_running(self) -> None:
        """Keep the cached keys and values of running rows."""
        running = {row.group for row in self._rows}
        for group in self._queue:
            group.reset_prompt()
            if group not in running:
                self._cache.remove(group.prompts())

    def _recompute(self) -> None:
        """Drop all cached keys and values, and recompute those of running rows."""
        self._forget_entries()
        self._cache.clear()
        if self._cache.limit is not None:  # they may need more memory in other places
            for row in sorted(self._rows, key=lambda row: -row.started):
                self._set_back(row)
        self._runner.prefill_all(list({row.group: None for row in self._rows}))
        self._runner.restore(self._rows)

    def _forget_entries(self) -> None:
        """Give up all entries of rows and prompts, without a change of the cache."""
        for group in [*{row.group: None for row in self._rows}, *self._queue]:
            group.prompts()
        for row in self._rows:
            row.entry = None

    def _start(self) -> bool:
        """Start waiting completions while there is room: sample a first token, or restore their prefix."""
        started = self._take_waiting()
        if not started:
            return False
        self._remove_finished()
        first = [row for row in started if not row.tokens and not row.has_draft]
        drafted = [row for row in started if not row.tokens and row.has_draft]
        logits = [row.group.logits_V for row in first if row.group.logits_V is not None]
        self._runner.allocate([row for row in started if not row.tokens])
        self._runner.restore([row for row in started if row.tokens])
        self._rows.extend(started)
        now = time.perf_counter()
        for row in started:
            if not row.started:
                self._started += 1
                row.started, row.started_at = self._started, now
        if drafted:
            self._verify_drafts(drafted, self.drafting.first)
        for group in [group for group in self._queue if not group.waiting]:
            self._queue.remove(group)
            group.logits_V = None
        if first:
            self._append_tokens(first, torch.stack(logits))
        return True

    def _take_waiting(self) -> list[SequenceState]:
        """Take the waiting completions that fit, until their prefixes reach a step's token budget."""
        taken: list[SequenceState] = []
        if self._short and self._rows:
            return taken
        room, begun = self._max_sequences - len(self._rows), 0
        for group in self._queue:
            while group.waiting and group.is_prefilled and len(taken) < room and begun < self._prefill_tokens:
                taken.append(group.waiting.popleft())
                begun += len(taken[-1].tokens)
        parents = [row.group.entry for row in taken if row.group.entry is not None]
        lengths = [max(len(row.tokens), 1) for row in taken]
        while (fitting := self._cache.fitting(parents, lengths)) < len(taken) and self.prefixes.drop_oldest():
            pass
        for row in reversed(taken[fitting:]):
            row.group.waiting.appendleft(row)
        return taken[:fitting]

    def _give_up_memory(self, needy: SequenceGroup | None = None) -> None:
        """Free memory of what can be computed again: kept turns, prompts that wait, then the newest completion.

        Where nothing is left but the needy group, or the last completion, its request fails.
        """
        before = len(self._rows)
        self._remove_finished()
        if len(self._rows) < before or self.prefixes.drop_oldest():
            return
        self._short = True
        running = {row.group for row in self._rows}
        for group in reversed(self._queue):
            if group.entry is not None and group not in running and group is not needy:
                self._cache.remove(group.prompts())
                return
        if len(self._rows) > 1:
            self._set_back(max(self._rows, key=lambda row: row.started))
            self.preemptions += 1
            return
        group = needy or self._rows[0].group
        request = group.request
        error = EngineError(
            f"{request.id}: a prompt of {len(request.prompt_ids)} tokens and up to {group.limit} new ones do not fit "
            f"into the KV cache of {self._cache_gb:.3g} GiB; raise engine.cache_gb, or lower max_new_tokens"
        )
        self.abort(group)
        group.results.put_nowait(error)

    def _set_back(self, row: SequenceState) -> None:
        """Let a running completion wait, without keys and values; it goes on before those that wait already."""
        self._rows.remove(row)
        group, entry = row.group, row.entry
        if entry is not None:
            self._cache.remove([entry])
            row.entry = None
        group.waiting.appendleft(row)
        if group not in self._queue:
            self._queue.appendleft(group)
        if all(other.group is not group for other in self._rows):
            self._cache.remove(group.prompts())
        self._runner.invalidate()

    def _verify_drafts(self, rows: list[SequenceState], check: Callable[[list[SequenceState], int], None]) -> None:
        """Extend rows by the accepted part of their drafts; retire finished rows."""
        before = sum(len(row.tokens) for row in rows)
        check(rows, self.version)
        self.tokens_generated += sum(len(row.tokens) for row in rows) - before
        self._retire([row for row in rows if row.stop_reason is not None])

    def _append_tokens(self, rows: list[SequenceState], logits_BV: Tensor, uniform_B: Tensor | None = None) -> None:
        """Sample a token for each row from its logits; retire finished rows."""
        top = max(row.group.request.record_top for row in rows)
        found = self._runner.sample(rows, logits_BV, top, uniform_B)
        emit_tokens(rows, found.tokens, found.logprobs, found.kept, logits_BV)
        self.tokens_generated += sum(row.stop_reason is None for row in rows)
        finished = [
            row
            for at, row in enumerate(rows)
            if row.stop_reason is None and row.append(*found.at(at), self.version, found.top(at))
        ]
        self._retire(finished)

    def _retire(self, finished: list[SequenceState]) -> None:
        if finished and self._runner.recurrent:
            self._runner.invalidate()  # writes the states back into the entries
        self._short = self._short and not finished
        for row in finished:
            current = not self._keep or all(version == self.version for version in row.versions)
            if row.group.request.continues:
                self.expected += 1
                if current:
                    self.prefixes.keep(row)
            row.group.hand_out(row)
        self._remove_finished(self._runner.decoder.slack)

    def _remove_finished(self, slack: float = 0.0) -> None:
        """Remove finished rows from the batch, once they are more than `slack` of it, and prompts that no row needs."""
        ended = [row for row in self._rows if row.stop_reason is not None]
        if len(ended) <= slack * len(self._rows):
            return
        self._rows = [row for row in self._rows if row.stop_reason is None]
        entries = [row.entry for row in ended if row.entry is not None]
        for group in {row.group: None for row in ended}:
            if group.unfinished == 0:
                entries += group.prompts()
        self._cache.remove(entries)
        self._runner.invalidate()
