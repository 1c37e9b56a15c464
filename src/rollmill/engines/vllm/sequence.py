"""A running request in vLLM and its completions, as the client sees them."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmill.data.picture_prompts import PicturePrompt, unexpanded_prompt
from rollmill.engines.base import CompletionPrefix, GenerationRequest, SampledToken
from rollmill.engines.stop_strings import (
    RepetitionDetector,
    RunningRequest,
    completion_text,
    max_new_tokens_for,
    stop_matcher_for,
)
from rollmill.errors import UnsupportedRequestError
from rollmill.seeds import derive_seed
from rollmill.types import Completion, StopReason

_REASONS = {"stop": StopReason.EOS, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_SEED_BITS = 2**63 - 1


@dataclass(slots=True, eq=False)
class VLLMSequenceGroup(RunningRequest):
    """A request to vLLM."""

    @property
    def streamed(self) -> bool:
        """True if tokens are needed one by one."""
        request = self.request
        ends_here = self.stops is not None or request.sampling.repetition is not None
        return ends_here or request.counted or request.on_token is not None

    def sequences(self, numbers: Iterator[int]) -> list[VLLMSequence]:
        """Build the completions, each with one of `numbers`."""
        prefixes = dict(enumerate(self.request.prefixes))
        return [VLLMSequence(self, index, next(numbers), prefixes.get(index)) for index in range(self.request.n)]

    def message(self, samples: list[VLLMSequence]) -> dict[str, Any]:
        """Build the message for vLLM's process, about some of the completions. Each continues its own tokens."""
        sampling = {
            "temperature": self.request.sampling.temperature,
            "stop_token_ids": sorted(self.stop_ids),
            **_truncation(self.request),
        }
        prompt = [int(token) for token in self.request.prompt_ids]
        seen = {} if self.request.pictures is None else self._seen(self.request.pictures, prompt)
        own = [(each.number, each.seed, self.limit - len(each.tokens), each.tokens) for each in samples]
        return {
            "samples": own, "prompt": prompt, "sampling": sampling, "stream": self.streamed, "top": self.request.top,
            **seen,
        }  # fmt: skip

    def _seen(self, pictures: PicturePrompt, prompt: list[int]) -> dict[str, Any]:
        """The prompt with one token for each picture, and the pictures, which vLLM prepares by the same processor."""
        short, images = unexpanded_prompt(self.tokenizer.picture_processor, pictures, prompt)
        return {"short": short, "pictures": [base64.b64encode(each).decode() for each in images]}


@dataclass(slots=True, eq=False)
class VLLMSequence:
    """One completion of a group, perhaps begun earlier: `prefix`."""

    group: VLLMSequenceGroup
    index: int
    number: int  # unique within the engine
    prefix: CompletionPrefix | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  # log of the probability mass that truncation kept
    stop_reason: StopReason | None = None  # found here; vLLM knows only end ids and lengths
    repetition: RepetitionDetector | None = None
    began_at: float | None = None

    def __post_init__(self) -> None:
        """Append the tokens of the prefix, up to one that ends the completion."""
        self.again()

    @property
    def seed(self) -> int:
        """Seed derived as in the native engine, cut to the range that vLLM accepts.

        vLLM's random numbers start again with each request, so a completion that continues gets others: with those of
        its first tokens the later ones would depend on them.
        """
        begun = () if not self._begun else (self._begun,)
        return derive_seed(self.group.request.seed, self.index, *begun) & _SEED_BITS

    @property
    def told(self) -> bool:
        """True if the callback has received tokens, so that it cannot start over."""
        return self.group.request.on_token is not None and len(self.tokens) > self._begun

    @property
    def _begun(self) -> int:
        """Number of tokens of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    def again(self) -> None:
        """Start over, with the tokens of the prefix."""
        request = self.group.request
        self.tokens, self.logprobs, self.kept, self.stop_reason = [], [], [], None
        config = request.sampling.repetition
        self.repetition = None if config is None else RepetitionDetector(config)
        if self.prefix is None:
            return
        begun = self.prefix
        for token, logprob, kept in zip(begun.token_ids, begun.logprobs, begun.kept_logmass, strict=True):
            self._append(int(token), float(logprob), float(kept))
            if self.stop_reason is None and token in self.group.stop_ids:
                self.stop_reason = StopReason.EOS
            elif self.stop_reason is None and len(self.tokens) >= self.group.limit:
                self.stop_reason = StopReason.LENGTH
            if self.stop_reason is not None:
                return

    def add(self, message: dict[str, Any]) -> bool:
        """Append new tokens, up to one that completes a stop string or a repetition; True if one does."""
        request = self.group.request
        self.began_at = self.began_at or time.perf_counter()
        kept = message.get("kept", [0.0] * len(message["tokens"]))
        for at, (token, logprob) in enumerate(zip(message["tokens"], message["logprobs"], strict=True)):
            if self.stop_reason is not None:
                return False
            self._append(token, logprob - kept[at], kept[at])
            if request.on_token is not None:
                top = tuple((int(id), float(value)) for id, value in message["top"][at]) if request.top else ()
                request.on_token(SampledToken(self.index, token, logprob, top))
        return self.stop_reason is not None

    def _append(self, token: int, logprob: float, kept: float) -> None:
        """Append a token; set the stop reason if it completes what vLLM does not look for."""
        group = self.group
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept)
        repeats = self.repetition is not None and self.repetition.add(token)
        if token in group.stop_ids:
            return  # vLLM ends it
        if group.stops is not None and group.stops.complete(self.tokens):
            self.stop_reason = StopReason.STOP
        elif repeats:
            self.stop_reason = StopReason.REPETITION

    def completion(self, message: dict[str, Any]) -> Completion:
        """Build the Completion from the final message."""
        group, now, count = self.group, time.perf_counter(), len(self.tokens)
        versions = [version for version, length in message["versions"] for _ in range(length)]
        if self.prefix is not None:
            versions = [*self.prefix.versions.tolist(), *versions]
        return Completion(
            prompt_ids=np.asarray(group.request.prompt_ids, np.int32),
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(versions[:count], np.int32),
            kept_logmass=np.asarray(self.kept, np.float32),
            text=self._text(),
            stop_reason=self.stop_reason or _REASONS[message["ended"]],
            seed=self.seed,
            index=self.index,
            submitted_at=group.submitted_at,
            started_at=group.submitted_at if self.began_at is None or not group.streamed else self.began_at,
            finished_at=now,
        )

    def _text(self) -> str:
        group = self.group
        stops = group.stops if self.stop_reason is StopReason.STOP else None
        return completion_text(self.tokens, group.tokenizer, stops)


NOTHING_MORE: dict[str, Any] = {"ended": "abort", "tokens": [], "logprobs": [], "versions": []}
"""Final message about a completion that vLLM was not asked for."""


def build_vllm_sequence_group(
    request: GenerationRequest, tokenizer: Any, eos_ids: frozenset[int], context: int
) -> VLLMSequenceGroup:
    """Build the group of a request. Raises EngineError for one that cannot be served."""
    limit = max_new_tokens_for(request, context)
    if any(request.drafts) or request.record_top:
        raise UnsupportedRequestError(f"{request.id}: vLLM takes no drafts; use engine `native`")
    if request.new_processor is not None:
        raise UnsupportedRequestError(f"{request.id}: vLLM takes no logits processors; use engine `native`")
    stops = stop_matcher_for(request, tokenizer)
    return VLLMSequenceGroup(request, limit, request.end_ids(eos_ids), stops, tokenizer)


def _truncation(request: GenerationRequest) -> dict[str, float]:
    """Those of top_p, top_k and min_p that leave tokens out; none of them for a greedy request."""
    sampling = request.sampling
    values = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    return {} if sampling.temperature == 0 else {key: value for key, (value, off) in values.items() if value != off}
