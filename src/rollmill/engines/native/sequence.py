"""State of a request and of each of its completions in the native engine."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rollmill.config.rollout import NgramConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest, LogitsProcessor
from rollmill.engines.native.draft import ActiveDraft, NgramSpeculator, activate_draft, activate_ngram_draft
from rollmill.engines.native.kv_cache import CacheEntry
from rollmill.engines.native.sampler import TopTokens
from rollmill.engines.stop_strings import (
    RepetitionDetector,
    RunningRequest,
    completion_text,
    max_new_tokens_for,
    stop_matcher_for,
)
from rollmill.seeds import derive_seed
from rollmill.types import Completion, DraftUse, FloatArray, IntArray, RoutingArray, StopReason


@dataclass(slots=True, eq=False)
class SequenceGroup(RunningRequest):
    """A request: its cached prompt, and the completions that wait for a place in the batch."""

    entry: CacheEntry | None = None
    older: list[CacheEntry] = field(default_factory=list)  # of older weights, still used by running completions
    prefilled: int = 0
    logits_V: Tensor | None = None  # after the prompt's last token
    routing: list[RoutingArray] = field(default_factory=list)  # of the prompt's tokens, if recorded
    waiting: deque[SequenceState] = field(default_factory=deque)
    unfinished: int = 0

    def __post_init__(self) -> None:
        """Create the completions; those whose prefix already ends them are returned at once."""
        request = self.request
        self.unfinished = request.n
        prefixes = dict(enumerate(request.prefixes))
        drafts = dict(enumerate(request.drafts))
        for index in range(request.n):
            row, earlier, draft = SequenceState(self, index), prefixes.get(index), drafts.get(index)
            if earlier is not None and row.begin(earlier):
                self.hand_out(row)
                continue
            if draft is not None and request.on_token is None and request.new_processor is None:
                row.proposal = activate_draft(draft, row.tokens, self.limit)
            self.waiting.append(row)

    @property
    def is_prefilled(self) -> bool:
        """True if all tokens of the prompt are cached."""
        return self.entry is not None and self.prefilled == len(self.request.prompt_ids)

    def reset_prompt(self) -> None:
        """Have the prompt prefilled again for waiting completions; running ones keep their prompt entry."""
        if self.entry is not None:
            self.older.append(self.entry)
        self.entry, self.prefilled, self.logits_V, self.routing = None, 0, None, []

    def prompts(self) -> list[CacheEntry]:
        """Give up and return all cache entries of the prompt."""
        self.reset_prompt()
        found, self.older = self.older, []
        return found

    def hand_out(self, row: SequenceState) -> None:
        """Put a finished completion into the results queue."""
        self.unfinished -= 1
        self.results.put_nowait(row.completion())


@dataclass(slots=True, eq=False)
class SequenceState:
    """One completion. Its last token is sampled but not yet in the cache."""

    group: SequenceGroup
    index: int
    seed: int = 0
    entry: CacheEntry | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # `DraftUse` of the tokens
    started: int = 0  # its number among the completions that started, from 1 on; 0: it has not
    started_at: float | None = None
    stop_reason: StopReason | None = None
    repetition: RepetitionDetector | None = None
    processor: LogitsProcessor | None = None
    guesser: NgramSpeculator | None = None
    proposal: ActiveDraft | None = None
    top: list[TopTokens | None] = field(default_factory=list)
    prompt_routing: list[RoutingArray] | None = None
    """Experts of the prompt's tokens in the pass before its first token was sampled."""
    routing: list[RoutingArray] = field(default_factory=list)
    """Experts of its tokens, each from the first pass that fed it: the pass that gave the next token's log-prob."""

    def __post_init__(self) -> None:
        request = self.group.request
        self.seed = derive_seed(request.seed, self.index)
        if request.sampling.repetition is not None:
            self.repetition = RepetitionDetector(request.sampling.repetition)
        if request.new_processor is not None:
            self.processor = request.new_processor()
        elif request.sampling.ngram_draft is not None and request.on_token is None:
            self.guesser = NgramSpeculator(request.sampling.ngram_draft, request.prompt_ids)

    def begin(self, prefix: CompletionPrefix) -> bool:
        """Append the prefix, up to a token that ends the completion; True if one does."""
        arrays = (prefix.token_ids, prefix.logprobs, prefix.kept_logmass, prefix.versions)
        if prefix.routing is not None and len(prefix.token_ids):
            prompt = len(self.group.request.prompt_ids)
            self.prompt_routing, self.routing = list(prefix.routing[:prompt]), list(prefix.routing[prompt:])
        top: list[TopTokens | None] = [None] * len(prefix.token_ids)
        if prefix.top_ids is not None and prefix.top_probs is not None:
            top = list(zip(prefix.top_ids, prefix.top_probs, strict=True))
        drafted = [DraftUse.NONE] * len(top) if prefix.drafted is None else prefix.drafted.tolist()
        columns = (*(array.tolist() for array in arrays), top, drafted)
        return any(self.append(*each) for each in zip(*columns, strict=True))

    @property
    def has_draft(self) -> bool:
        """True if tokens of an earlier completion are left to verify."""
        return self.proposal is not None and not self.proposal.guessed and self.stop_reason is None

    @property
    def draft_window(self) -> int:
        """Number of draft tokens to verify in the next pass."""
        return 0 if self.proposal is None else min(self.proposal.window, self.proposal.left(len(self.tokens)))

    def next_draft_tokens(self, count: int) -> list[int]:
        """Up to `count` draft tokens that may come next."""
        if self.proposal is None:
            return []
        tokens: list[int] = self.proposal.part(len(self.tokens), count)[0].tolist()
        return tokens

    def propose(self) -> bool:
        """Make a guess of the next tokens, if possible; True if there is one."""
        at, group = len(self.tokens), self.group
        if self.stop_reason is not None:
            return False
        if self.proposal is None and self.guesser is not None:
            tokens = self.guesser.propose(self.tokens)[: group.limit - at]
            self.proposal = activate_ngram_draft(at, tokens) if tokens else None
        if self.proposal is not None and self.proposal.left(at) <= 0:
            self.proposal = None
        return self.proposal is not None

    def checked(self, accepted: int, tested: int) -> None:
        """Report that `tested` draft tokens were verified and `accepted` of them accepted."""
        assert self.proposal is not None
        if self.proposal.once and self.guesser is not None:
            self.guesser.told(accepted, tested, len(self.tokens))
        before, self.proposal = self.proposal, self.proposal.after(accepted, tested)
        if self.proposal is None and self.guesser is None:  # guess on from the earlier completion's n-grams
            text = [*self.group.request.prompt_ids, *before.token_ids.tolist()]
            self.guesser = NgramSpeculator(NgramConfig(length=3, tokens=8), text)
        if self.proposal is not None and self.proposal.left(len(self.tokens)) <= 0:
            self.proposal = None

    def fed(self, start: int, routing: RoutingArray) -> None:
        """Record the experts of tokens from `start` on, unless an earlier pass has. Empty: routing is not recorded."""
        self.routing.extend(routing[len(self.routing) - start :])

    def append(
        self,
        token: int,
        logprob: float,
        kept: float,
        version: int,
        top: TopTokens | None = None,
        drafted: int = DraftUse.NONE,
    ) -> bool:
        """Add a sampled token; True if the completion is now finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept)
        self.versions.append(version)
        self.top.append(top)
        self.drafted.append(drafted)
        group = self.group
        repeats = self.repetition is not None and self.repetition.add(token)
        if token in group.stop_ids:
            self.stop_reason = StopReason.EOS
        elif group.stops is not None and group.stops.complete(self.tokens):
            self.stop_reason = StopReason.STOP
        elif repeats:
            self.stop_reason = StopReason.REPETITION
        elif len(self.tokens) >= group.limit:
            self.stop_reason = StopReason.LENGTH
        return self.stop_reason is not None

    def completion(self) -> Completion:
        """Build the Completion of a finished row."""
        assert self.stop_reason is not None
        group, now = self.group, time.perf_counter()
        top_ids, top_probs = self._recorded(group.request.record_top)
        return Completion(
            prompt_ids=np.asarray(group.request.prompt_ids, np.int32),
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            kept_logmass=np.asarray(self.kept, np.float32),
            text=self._text(),
            stop_reason=self.stop_reason,
            seed=self.seed,
            index=self.index,
            top_ids=top_ids,
            top_probs=top_probs,
            routing=self._routing(),
            drafted=np.array(self.drafted, np.uint8) if any(self.drafted) else None,
            submitted_at=group.submitted_at,
            started_at=now if self.started_at is None else self.started_at,
            finished_at=now,
        )

    def _recorded(self, count: int) -> tuple[IntArray, FloatArray] | tuple[None, None]:
        """Top ids and probabilities, [T, K] each; probability 0 where unknown."""
        if not count:
            return None, None
        ids, probs = np.zeros((len(self.top), count), np.int32), np.zeros((len(self.top), count), np.float32)
        for at, top in enumerate(self.top):
            if top is not None:
                found = min(count, len(top[0]))
                ids[at, :found], probs[at, :found] = top[0][:found], top[1][:found]
        return ids, probs

    def _routing(self) -> RoutingArray | None:
        """[prompt + tokens - 1, L, k]; None if nothing was recorded."""
        if not self.prompt_routing:
            return None
        return np.stack([*self.prompt_routing, *self.routing])[: len(self.prompt_routing) + len(self.tokens) - 1]

    def _text(self) -> str:
        group = self.group
        return completion_text(
            self.tokens, group.tokenizer, group.stops if self.stop_reason is StopReason.STOP else None
        )


def build_sequence_group(
    request: GenerationRequest, tokenizer: Any, eos_ids: frozenset[int], context: int
) -> SequenceGroup:
    """Build the group of a request. Raises EngineError for one that cannot be served."""
    limit, stops = max_new_tokens_for(request, context), stop_matcher_for(request, tokenizer)
    return SequenceGroup(request, limit, request.end_ids(eos_ids), stops, tokenizer)
