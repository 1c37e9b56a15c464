"""Speculative decoding: verifies the draft tokens of running completions, many per forward pass.

A row's draft tokens are fed as if they had been sampled, in one pass, and its cache entry is cut back to the accepted
ones. Tokens of an earlier completion are accepted or replaced by rejection sampling (below), with random numbers from
streams apart from plain sampling's. A guess is accepted if plain sampling, with its own random number, gives the same
token, so guesses change only the speed. A completion thus depends on its seed and its draft alone, however tokens are
cut into passes.

Shapes: P positions of a pass (of all rows), R rejected ones, V vocabulary, K tokens with known old probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmill.engines.native.model_runner import ModelRunner
from rollmill.engines.native.row_sampler import build_sampling_tensors, require_finite
from rollmill.engines.native.sampler import (
    HostSamplerOutput,
    normalized_probs,
    row_slices,
    sample_inverse_cdf,
    sample_tokens,
    select_top_tokens,
    truncated_probs,
)
from rollmill.engines.native.sequence import SequenceState
from rollmill.seeds import counter_uniforms, derive_seed
from rollmill.types import DraftUse

# Rejection sampling of draft tokens, so that the result follows the new distribution exactly.
#
# A draft token x was drawn from an old distribution of which the probabilities of some tokens are known. It is accepted
# with probability min(1, new(x) / old(x)) if its own is known, else never. A rejected token is replaced by a draw from
# max(new - old, 0), where unknown old probabilities count as 0: such tokens are never accepted. Then P(y) = old(y)
# min(1, new(y) / old(y)) + (new(y) - min(new(y), old(y))) = new(y) for known tokens, and new(y) for all others. With
# every probability known this is speculative sampling (arXiv:2211.17192, Theorem 1). A guessed token counts as drawn
# from a point mass. Drawing the replacement from new itself would be biased.
#
# Shapes: B draft tokens, V vocabulary, K tokens whose old probability is known.


class DraftBatch(NamedTuple):
    """Draft tokens and the known part of the distributions they were drawn from; padding has probability 0."""

    token_B: Tensor
    known_BK: Tensor  #: token ids, each at most once in a row, unless with probability 0
    probs_BK: Tensor  #: their old probabilities

    def part(self, rows: slice | Tensor) -> DraftBatch:
        return DraftBatch(self.token_B[rows], self.known_BK[rows], self.probs_BK[rows])


def acceptance_probability(new_B: Tensor, drafted: DraftBatch) -> Tensor:
    """Probability of accepting each token, [B]; `new_B` are the tokens' own new probabilities."""
    own = torch.where(drafted.known_BK == drafted.token_B[:, None], drafted.probs_BK, 0.0).sum(-1)
    return torch.where(own > 0, (new_B / own.clamp(min=torch.finfo(own.dtype).tiny)).clamp(max=1), 0.0)


def residual_weights(new_BV: Tensor, drafted: DraftBatch) -> Tensor:
    """Weights [B, V] of a rejected token's replacement: max(new - old, 0). They sum to less than 1.

    If rounding leaves nothing (new equals old, so that a rejection has no probability), new itself.
    """
    common_BK = torch.minimum(new_BV.gather(1, drafted.known_BK), drafted.probs_BK)
    left_BV = new_BV.scatter_add(1, drafted.known_BK, -common_BK).clamp_(min=0)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, new_BV)


ACCEPT_STREAM, REPLACE_STREAM = 0xACC, 0x4E9


@dataclass(slots=True)
class SpeculationStats:
    """Counts of draft tokens since the engine was created."""

    passes: int = 0  #: forward passes
    fed: int = 0  #: tokens in them
    reuse_tested: int = 0  #: tokens of earlier completions that were accepted or rejected
    reuse_accepted: int = 0
    guess_tested: int = 0
    guess_accepted: int = 0


class DraftVerifier:
    """Verifies draft tokens and counts the results in `counts`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.counts = SpeculationStats()
        self._runner = runner

    def first(self, rows: list[SequenceState], version: int) -> None:
        """Verify the first draft token of new rows against the logits after their prompts."""
        prompts = [row.group.logits_V for row in rows if row.group.logits_V is not None]
        self._accept(rows, torch.stack(prompts), [1] * len(rows), version)

    def drafts(self, rows: list[SequenceState], version: int) -> None:
        """Verify drafts of earlier completions for rows that have tokens: append what is accepted and the replacement
        of the first rejected token; the rest becomes guesses. One pass: rows that do not fit wait for the next."""
        batch, counts = next(self._passes(rows))
        self._accept(batch, self._fed(batch, counts), counts, version)
        self._runner.truncate(batch)

    def verify_ngram_drafts(self, rows: list[SequenceState], version: int) -> None:
        """Verify guesses for rows that have tokens: append the right ones and, for the first wrong one, the sampled
        token."""
        for batch, counts in self._passes(rows):
            self._compare(batch, self._fed(batch, counts), counts, version)
            self._runner.truncate(batch)

    def _passes(self, rows: list[SequenceState]) -> Iterator[tuple[list[SequenceState], list[int]]]:
        """Yield the rows that share a pass, and how many positions of each are verified."""
        room = self._runner.max_logits
        batch: list[SequenceState] = []
        counts: list[int] = []
        for row in rows:
            batch.append(row)
            counts.append(min(row.draft_window, room))
            if sum(counts) >= room:
                yield batch, counts
                batch, counts = [], []
        if batch:
            yield batch, counts

    def _fed(self, rows: list[SequenceState], counts: list[int]) -> Tensor:
        """Feed each row's latest token and all its draft tokens but the last; return the logits [P, V] to test them."""
        fed = [[row.tokens[-1], *row.next_draft_tokens(count - 1)] for row, count in zip(rows, counts, strict=True)]
        self.counts.passes += 1
        self.counts.fed += sum(counts)
        return self._runner.extend(rows, fed)

    def _compare(self, rows: list[SequenceState], logits_PV: Tensor, counts: list[int], version: int) -> None:
        """Sample at every position, up to the first wrong guess."""
        each, offsets = _positions(rows, counts)
        uniform_P = torch.from_numpy(_uniforms(each, offsets)).to(logits_PV.device)
        top = max(row.group.request.record_top for row in rows)
        sampled = sample_tokens(logits_PV, build_sampling_tensors(each, logits_PV.device), uniform_P, top)
        found, start = HostSamplerOutput.of(*sampled), 0
        require_finite(each, found.logprobs)
        for row, count in zip(rows, counts, strict=True):
            guessed = row.next_draft_tokens(count)
            right = tested = 0
            for at, token in enumerate(guessed, start):
                agrees = found.tokens[at] == token
                use = DraftUse.GUESS if agrees else DraftUse.REJECTED
                ended = row.append(*found.at(at), version, found.top(at), use)
                tested += 1
                right += agrees
                if ended or not agrees:
                    break
            start += count
            self.counts.guess_tested += tested
            self.counts.guess_accepted += right
            row.checked(right, tested)

    def _accept(self, rows: list[SequenceState], logits_PV: Tensor, counts: list[int], version: int) -> None:
        """Accept or replace draft tokens and append them; `counts` are each row's positions among the logits."""
        drafted = DraftBatch(*(part.to(logits_PV.device) for part in _drafted(rows, counts)))
        top = max(row.group.request.record_top for row in rows)
        agreed, found = self._tested(rows, logits_PV, counts, drafted, top)
        rejected: list[tuple[SequenceState, int]] = []
        start = 0
        for row, count in zip(rows, counts, strict=True):
            accepted = tested = 0
            for at in range(start, start + count):
                tested += 1
                if not agreed[at]:
                    rejected.append((row, at))
                    break
                accepted += 1
                if row.append(*found.at(at), version, found.top(at), DraftUse.EARLIER):
                    break
            start += count
            self.counts.reuse_tested += tested
            self.counts.reuse_accepted += accepted
            if tested == accepted:
                row.checked(accepted, tested)
        if rejected:
            self._replace(rejected, logits_PV, drafted, top, version)

    def _tested(
        self, rows: list[SequenceState], logits_PV: Tensor, counts: list[int], drafted: DraftBatch, top: int
    ) -> tuple[npt.NDArray[np.bool_], HostSamplerOutput]:
        """Return for each position whether its token is accepted, and the token with its log-probs."""
        each, offsets = _positions(rows, counts)
        uniform_P = torch.from_numpy(_uniforms(each, offsets, ACCEPT_STREAM)).to(logits_PV.device)
        params = build_sampling_tensors(each, logits_PV.device)
        parts = []
        for cut in row_slices(logits_PV):
            logits, own, some = logits_PV[cut], params.part(cut), drafted.part(cut)
            probs, kept = truncated_probs(logits, own)
            drawn = normalized_probs(probs, kept, logits, own)
            picked, new = (x.gather(1, some.token_B[:, None])[:, 0] for x in (probs, drawn))
            agreed = uniform_P[cut] < acceptance_probability(new, some)
            parts.append((agreed, torch.log(picked / kept), torch.log(kept), *select_top_tokens(drawn, top)))
        agreed, logprob, *others = (torch.cat(part) for part in zip(*parts, strict=True))
        found = HostSamplerOutput.of(drafted.token_B, logprob, *others)
        require_finite(each, found.logprobs, impossible=True)
        return agreed.cpu().numpy(), found

    def _replace(
        self, rejected: list[tuple[SequenceState, int]], logits_PV: Tensor, drafted: DraftBatch, top: int, version: int
    ) -> None:
        rows, at = [row for row, _ in rejected], torch.tensor([at for _, at in rejected], device=logits_PV.device)
        logits_RV, params = logits_PV[at], build_sampling_tensors(rows, logits_PV.device)
        uniform_R = torch.from_numpy(_uniforms(rows, np.zeros(len(rows), np.int64), REPLACE_STREAM)).to(at.device)
        parts = []
        for cut in row_slices(logits_RV):
            logits, own = logits_RV[cut], params.part(cut)
            probs, kept = truncated_probs(logits, own)
            drawn = normalized_probs(probs, kept, logits, own)
            tokens = sample_inverse_cdf(residual_weights(drawn, drafted.part(at[cut])), uniform_R[cut])
            picked = probs.gather(1, tokens[:, None])[:, 0]
            parts.append((tokens, torch.log(picked / kept), torch.log(kept), *select_top_tokens(drawn, top)))
        columns = [torch.cat(part) for part in zip(*parts, strict=True)]
        found = HostSamplerOutput.of(*columns)
        require_finite(rows, found.logprobs)
        for number, row in enumerate(rows):
            same = found.tokens[number] == row.next_draft_tokens(1)[0]  # its old probability was not known
            row.append(*found.at(number), version, found.top(number), DraftUse.REJECTED)
            row.checked(int(same), 1)


def _positions(rows: list[SequenceState], counts: list[int]) -> tuple[list[SequenceState], npt.NDArray[np.int64]]:
    """The row of every position, and its offset from the row's tokens."""
    each = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    return each, np.concatenate([np.arange(count) for count in counts])


def _drafted(rows: list[SequenceState], counts: list[int]) -> DraftBatch:
    """The rows' next draft tokens, concatenated."""
    parts = []
    for row, count in zip(rows, counts, strict=True):
        assert row.proposal is not None
        parts.append(row.proposal.part(len(row.tokens), count))
    widest = max(known.shape[1] for _, known, _ in parts)
    tokens = np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int64)
    known, probs = np.zeros((len(tokens), widest), np.int64), np.zeros((len(tokens), widest), np.float32)
    start = 0
    for own, ids, values in parts:
        at = (slice(start, start + len(own)), slice(ids.shape[1]))
        known[at], probs[at] = ids, values
        start += len(own)
    return DraftBatch(torch.from_numpy(tokens), torch.from_numpy(known), torch.from_numpy(probs))


def _uniforms(
    rows: list[SequenceState], offsets: npt.NDArray[np.int64], stream: int | None = None
) -> npt.NDArray[np.float64]:
    """One uniform number per position, `offsets` after the row's tokens; `stream` None: plain sampling's stream."""
    seeds = {row: row.seed if stream is None else derive_seed(row.seed, stream) for row in dict.fromkeys(rows)}
    counters = np.fromiter((len(row.tokens) for row in rows), np.uint64, len(rows)) + offsets.astype(np.uint64)
    return counter_uniforms(np.fromiter((seeds[row] for row in rows), np.uint64, len(rows)), counters)
