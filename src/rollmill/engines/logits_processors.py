"""Logits processors: penalties, biases and grammars, which change what one completion is sampled from.

Shapes: V vocabulary, N tokens of the vocabulary that are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.engines.base import LogitsProcessor, TokenPenalties
from rollmill.errors import ConfigError

MISSING_GRAMMARS = "constrained decoding needs the llguidance library: pip install 'rollmill[grammar]'"


class PenaltyProcessor:
    """Applies the penalties of a request to one completion."""

    def __init__(self, penalties: TokenPenalties, prompt_ids: Sequence[int]) -> None:
        self._penalties = penalties
        self._counts, self._seen = Counter[int](), 0
        self._repeated = dict.fromkeys(prompt_ids)  # in order, and each once

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        penalties, found_V = self._penalties, logits_V.float().clone()
        new, self._seen = tokens[self._seen :], len(tokens)
        self._counts.update(new)
        self._repeated |= dict.fromkeys(new)
        if penalties.bias:
            found_V[_indices(penalties.bias, found_V)] += _values(penalties.bias.values(), found_V)
        if penalties.repetition != 1.0 and self._repeated:
            index_N = _indices(self._repeated, found_V)
            own_N = found_V[index_N]
            found_V[index_N] = torch.where(own_N > 0, own_N / penalties.repetition, own_N * penalties.repetition)
        if self._counts and (penalties.presence or penalties.frequency):
            number_N = _values(self._counts.values(), found_V)
            found_V[_indices(self._counts, found_V)] -= penalties.presence + penalties.frequency * number_N
        return found_V


class GrammarProcessor:
    """Excludes tokens with which one completion could not be a text of a grammar.

    Attributes:
        failure: why the grammar could not be followed to its end, if so; the completion ends at once.
    """

    def __init__(self, matcher: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self.failure = ""
        self._matcher, self._vocabulary, self._seen = matcher, vocabulary, 0
        self._end = np.zeros(vocabulary, bool)
        self._end[list(eos_ids)] = True

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        new, self._seen = tokens[self._seen :], len(tokens)
        allowed = self._allowed(list(new))
        excluded_V = torch.ones(len(logits_V), dtype=torch.bool)  # also ids that no token has
        excluded_V[: self._vocabulary] = torch.from_numpy(~allowed)
        return logits_V.float().masked_fill(excluded_V.to(logits_V.device), float("-inf"))

    def _allowed(self, new: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if not self.failure:
            self._matcher.consume_tokens(new)
            packed = self._matcher.compute_bitmask()
            self.failure = self._matcher.get_error()
        if self.failure:
            return self._end
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return bits[: self._vocabulary].astype(bool)


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Raises ConfigError without the library (extra `grammar`), or for a tokenizer that it does not support.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(MISSING_GRAMMARS) from error
        self._make, self._eos_ids = LLMatcher, list(eos_ids)
        try:
            self._tokens = from_tokenizer(tokenizer, eos_token=self._eos_ids)
        except ValueError as error:
            raise ConfigError(f"constrained decoding does not support the model's tokenizer: {error}") from error

    def compile(self, lark: str) -> CompiledGrammar:
        """Compile a grammar in llguidance's variant of Lark. Raises ValueError for one that is not supported."""
        matcher = self._make(self._tokens, self._make.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return CompiledGrammar(matcher, self._tokens.vocab_size, self._eos_ids)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready for any number of completions."""

    matcher: Any
    vocabulary: int
    eos_ids: list[int]

    def new_processor(self) -> GrammarProcessor:
        """Create the processor of a completion."""
        return GrammarProcessor(self.matcher.deep_copy(), self.vocabulary, self.eos_ids)


class ProcessorList:
    """Several processors, each applied to what the one before returns."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        for processor in self._processors:
            logits_V = processor(tokens, logits_V)
        return logits_V


def _indices(tokens: Any, like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=like.device)


def _values(numbers: Any, like: Tensor) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float32, device=like.device)
