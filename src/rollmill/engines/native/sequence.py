"""What the engine knows of a request and of each of its completions."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rollmill.core.types import Completion, StopReason
from rollmill.engines.base import Begun, Request
from rollmill.engines.native.cache import Entry
from rollmill.engines.native.rng import fold
from rollmill.engines.native.stops import StopStrings, stop_strings


@dataclass(slots=True, eq=False)
class Group:
    """A request: its prompt in the cache, and completions waiting for a place in the batch."""

    request: Request
    limit: int  # new tokens per completion
    stop_ids: frozenset[int]
    stops: StopStrings | None
    tokenizer: Any
    results: asyncio.Queue[Completion | BaseException] = field(default_factory=asyncio.Queue)
    submitted_at: float = field(default_factory=time.perf_counter)
    entry: Entry | None = None
    prefilled: int = 0
    logits_V: Tensor | None = None  # after the prompt's last token
    waiting: deque[Row] = field(default_factory=deque)
    unfinished: int = 0

    def __post_init__(self) -> None:
        """Completions that are whole before they start, by the tokens they begin with, are handed out at once."""
        begun = [*self.request.begun, *[None] * (self.request.n - len(self.request.begun))]
        self.unfinished = self.request.n
        for index, earlier in enumerate(begun):
            row = Row(self, index)
            if earlier is not None and row.begin(earlier):
                self.hand_out(row)
            else:
                self.waiting.append(row)

    def hand_out(self, row: Row) -> None:
        """Give a completion that has ended to whoever asked for it."""
        self.unfinished -= 1
        self.results.put_nowait(row.completion())


@dataclass(slots=True, eq=False)
class Row:
    """One completion. Its last token is sampled but not yet in the cache."""

    group: Group
    index: int
    seed: int = 0
    entry: Entry | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        request = self.group.request
        self.seed = fold(request.seed, self.index)

    def begin(self, begun: Begun) -> bool:
        """Take over tokens that were sampled earlier, up to one that ends the completion; True if one does."""
        arrays = (begun.token_ids, begun.logprobs, begun.kept_logmass, begun.versions)
        return any(self.append(*each) for each in zip(*(array.tolist() for array in arrays), strict=True))

    def append(self, token: int, logprob: float, kept: float, version: int) -> bool:
        """Add a sampled token; True if the completion is now finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept)
        self.versions.append(version)
        group = self.group
        if token in group.stop_ids:
            self.stop_reason = StopReason.EOS
        elif group.stops is not None and group.stops.complete(self.tokens):
            self.stop_reason = StopReason.STOP
        elif len(self.tokens) >= group.limit:
            self.stop_reason = StopReason.LENGTH
        return self.stop_reason is not None

    def completion(self) -> Completion:
        """The completion, which has ended."""
        assert self.stop_reason is not None
        group, now = self.group, time.perf_counter()
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
            submitted_at=group.submitted_at,
            started_at=now if self.started_at is None else self.started_at,
            finished_at=now,
        )

    def _text(self) -> str:
        tokenizer, stops = self.group.tokenizer, self.group.stops
        if self.stop_reason is StopReason.STOP and stops is not None:
            text = stops.cut(tokenizer.decode(self.tokens))  # a stop string may hold special tokens
            for special in tokenizer.all_special_tokens:
                text = text.replace(special, "")
            return text
        return "" if tokenizer is None else str(tokenizer.decode(self.tokens, skip_special_tokens=True))


def make_group(request: Request, tokenizer: Any, eos_ids: frozenset[int], context: int) -> Group:
    """The group of a request that is known to fit the context."""
    sampling = request.sampling
    stops = stop_strings(tokenizer, tuple(sampling.stop)) if sampling.stop else None
    limit = min(sampling.max_new_tokens, context - len(request.prompt_ids))
    return Group(request, limit, eos_ids | frozenset(sampling.stop_token_ids), stops, tokenizer)
