"""Telling those who listen what was sampled, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollmill.engines.base import SampledToken
from rollmill.engines.native.sequence import SequenceState


def emit_tokens(
    rows: Sequence[SequenceState],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    kept: Sequence[float],
    logits_BV: Tensor,
) -> None:
    """Tell the requests of running rows, if they listen, which token was sampled for each."""
    listening = [i for i, row in enumerate(rows) if row.stop_reason is None and row.group.request.on_token is not None]
    tops = _tops(rows, [i for i in listening if rows[i].group.request.top], logits_BV)
    for i in listening:
        on_token = rows[i].group.request.on_token
        assert on_token is not None
        on_token(SampledToken(rows[i].index, tokens[i], logprobs[i] + kept[i], tops.get(i, ())))


def _tops(
    rows: Sequence[SequenceState], asked: list[int], logits_BV: Tensor
) -> dict[int, tuple[tuple[int, float], ...]]:
    """The most probable tokens of the rows `asked`, by row."""
    if not asked:
        return {}
    requests = [rows[i].group.request for i in asked]
    scale_A = torch.tensor([request.sampling.temperature or 1.0 for request in requests], device=logits_BV.device)
    logprobs_AV = torch.log_softmax(logits_BV[asked].float() / scale_A[:, None], dim=-1)
    most = min(max(request.top for request in requests), logprobs_AV.shape[1])
    values_AK, ids_AK = logprobs_AV.topk(most, dim=-1)
    pairs = zip(asked, requests, ids_AK.tolist(), values_AK.tolist(), strict=True)
    return {i: tuple(zip(ids, values, strict=True))[: request.top] for i, request, ids, values in pairs}
