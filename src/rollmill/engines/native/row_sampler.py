"""Samples the next tokens of running completions: their seeds, their processors, and a check of what the model says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmill.engines.native.sampler import HostSamplerOutput, SamplerOutput, SamplingTensors, sample_tokens
from rollmill.engines.native.sequence import SequenceState
from rollmill.errors import EngineError
from rollmill.seeds import counter_uniforms


def sample_rows(
    rows: list[SequenceState], logits_BV: Tensor, params: SamplingTensors, uniform_B: Tensor, top: int
) -> HostSamplerOutput:
    """Sample a token for each row by its uniform number. `top` is the number of most probable tokens to return.

    Raises EngineError: a log-prob is not finite.
    """
    shaped = [at for at, row in enumerate(rows) if row.processor is not None and row.stop_reason is None]
    if not shaped:
        sampled = sample_tokens(logits_BV, params, uniform_B, top)
    else:
        sampled = _sample_shaped(rows, shaped, logits_BV, params, uniform_B, top)
    found = HostSamplerOutput.of(*sampled)
    require_finite(rows, found.logprobs)
    return found


def _sample_shaped(
    rows: list[SequenceState],
    shaped: list[int],
    logits_BV: Tensor,
    params: SamplingTensors,
    uniform_B: Tensor,
    top: int,
) -> SamplerOutput:
    """Sample where the rows `shaped` have a processor. Their kept mass makes up for all that it changed, so that
    log-prob and kept mass still sum to the log-prob of the model's own distribution."""
    shaped_BV = logits_BV.float().clone()
    for at in shaped:
        processor = rows[at].processor
        assert processor is not None
        shaped_BV[at] = processor(rows[at].tokens, logits_BV[at])
    sampled = sample_tokens(shaped_BV, params, uniform_B, top)
    temperature_S = [rows[at].group.request.sampling.temperature or 1.0 for at in shaped]
    scale_S = torch.tensor(temperature_S, device=logits_BV.device)
    own_SV = torch.log_softmax(logits_BV[shaped].float() / scale_S[:, None], dim=-1)
    kept_B = sampled.kept_B.clone()
    kept_B[shaped] = own_SV.gather(1, sampled.token_B[shaped, None])[:, 0] - sampled.logprob_B[shaped]
    return sampled._replace(kept_B=kept_B)


def next_uniforms(rows: list[SequenceState]) -> npt.NDArray[np.float64]:
    """The uniform number [B] of each row's next token, from its seed and its number of tokens so far."""
    seeds = np.fromiter((row.seed for row in rows), np.uint64, len(rows))
    return counter_uniforms(seeds, np.fromiter((len(row.tokens) for row in rows), np.uint64, len(rows)))


def require_finite(rows: list[SequenceState], logprobs: Sequence[float], *, impossible: bool = False) -> None:
    """Raise an EngineError that names the first row whose log-prob is not finite.

    Args:
        impossible: tokens may have the probability 0.
    """
    for row, logprob in zip(rows, logprobs, strict=True):
        if not math.isfinite(logprob) and not (impossible and logprob == -math.inf):
            raise EngineError(
                f"{row.group.request.id}: the model's logits are not finite after {len(row.tokens)} new tokens; its "
                "weights have diverged (lower trainer.lr) or are damaged"
            )


def build_sampling_tensors(rows: list[SequenceState], device: torch.device) -> SamplingTensors:
    """Build the sampling parameters of the rows."""
    settings = [row.group.request.sampling for row in rows]
    return SamplingTensors.of([(s.temperature, s.top_p, s.top_k, s.min_p) for s in settings], device)
