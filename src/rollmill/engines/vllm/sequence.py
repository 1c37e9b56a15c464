"""A running request in vLLM and its completions, as the client sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmill.engines.base import GenerationRequest, SampledToken
from rollmill.engines.stop_strings import RunningRequest, completion_text, max_new_tokens_for, stop_matcher_for
from rollmill.errors import EngineError
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
        return self.stops is not None or self.request.on_token is not None

    def message(self, seeds: list[tuple[int, int]]) -> dict[str, Any]:
        """Build the message for vLLM's process; `seeds` are pairs of sample number and seed."""
        sampling = {
            "temperature": self.request.sampling.temperature,
            "max_tokens": self.limit,
            "stop_token_ids": sorted(self.stop_ids),
        }
        prompt = [int(token) for token in self.request.prompt_ids]
        return {
            "seeds": seeds, "prompt": prompt, "sampling": sampling, "stream": self.streamed, "top": self.request.top,
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class VLLMSequence:
    """One completion of a group."""

    group: VLLMSequenceGroup
    index: int
    number: int  # unique within the engine
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # by a stop string
    began_at: float | None = None

    @property
    def seed(self) -> int:
        """Seed derived as in the native engine, cut to the range that vLLM accepts."""
        return derive_seed(self.group.request.seed, self.index) & _SEED_BITS

    @property
    def told(self) -> bool:
        """True if the callback has received tokens, so that it cannot start over."""
        return self.group.request.on_token is not None and bool(self.tokens)

    def again(self) -> None:
        """Start over."""
        self.tokens, self.logprobs, self.stopped = [], [], False

    def add(self, message: dict[str, Any]) -> bool:
        """Append new tokens, up to one that completes a stop string; True if one does."""
        group, request = self.group, self.group.request
        self.began_at = self.began_at or time.perf_counter()
        for at, (token, logprob) in enumerate(zip(message["tokens"], message["logprobs"], strict=True)):
            if self.stopped:
                return False
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if request.on_token is not None:
                top = tuple((int(id), float(value)) for id, value in message["top"][at]) if request.top else ()
                request.on_token(SampledToken(self.index, token, logprob, top))
            if group.stops is not None and token not in group.stop_ids and group.stops.complete(self.tokens):
                self.stopped = True
        return self.stopped

    def completion(self, message: dict[str, Any]) -> Completion:
        """Build the Completion from the final message."""
        group, now, count = self.group, time.perf_counter(), len(self.tokens)
        reason = StopReason.STOP if self.stopped else _REASONS[message["ended"]]
        versions = [version for version, length in message["versions"] for _ in range(length)]
        return Completion(
            prompt_ids=np.asarray(group.request.prompt_ids, np.int32),
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(versions[:count], np.int32),
            kept_logmass=np.zeros(count, np.float32),
            text=self._text(),
            stop_reason=reason,
            seed=self.seed,
            index=self.index,
            submitted_at=group.submitted_at,
            started_at=group.submitted_at if self.began_at is None or not group.streamed else self.began_at,
            finished_at=now,
        )

    def _text(self) -> str:
        group = self.group
        return completion_text(self.tokens, group.tokenizer, group.stops if self.stopped else None)


def build_vllm_sequence_group(
    request: GenerationRequest, tokenizer: Any, eos_ids: frozenset[int], context: int
) -> VLLMSequenceGroup:
    """Build the group of a request. Raises EngineError for one that cannot be served."""
    sampling, limit = request.sampling, max_new_tokens_for(request, context)
    if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
        raise EngineError(f"{request.id}: vLLM does not say how much probability truncation keeps; use top_p 1, no "
                          "top_k and no min_p, or engine `native`")  # fmt: skip
    if any(request.prefixes) or any(request.drafts) or request.record_top:
        raise EngineError(f"{request.id}: vLLM takes no drafts and no tokens to go on from; use engine `native`")
    stops = stop_matcher_for(request, tokenizer)
    return VLLMSequenceGroup(request, limit, eos_ids | frozenset(sampling.stop_token_ids), stops, tokenizer)
