"""What some algorithms ask of the policy's whole next-token distributions, without holding [tokens, vocabulary].

Shapes: T tokens of the row, M predictions that count, C rows of a chunk, V vocabulary, d hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollmill.trainer.batch import MicroBatch, TokenTable
from rollmill.trainer.logprobs import CHUNK_LOGITS, compute_logits


class VocabularySums(NamedTuple):
    """Sums over the vocabulary at each prediction, [M] each, without gradient."""

    collision: Tensor  #: sum_v p_v^2
    expected_discriminant: Tensor  #: sum_v p_v^2 (H + log p_v)


@torch.no_grad()
def compute_vocabulary_sums(
    model: Any, hidden_Td: Tensor, micro: MicroBatch, table: TokenTable, *, chunk: int | None = None
) -> VocabularySums:
    """Sums over the vocabulary for a micro-batch's action tokens, at their rollout temperatures.

    Args:
        hidden_Td: last hidden states of the row.
        chunk: rows of logits that exist at a time; None: as many as take 256 MiB in float32, at most 1024.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    step = chunk or max(1, min(1024, CHUNK_LOGITS // vocabulary))
    temperature_M = table.temperature[micro.tokens]
    collision, discriminant = [], []
    for rows, temperature in zip(micro.rows.split(step), temperature_M.split(step), strict=True):
        logits_CV = compute_logits(model, hidden_Td.index_select(0, rows))
        log_p = torch.log_softmax(logits_CV / temperature[:, None], -1)
        p = log_p.exp()
        squares = torch.linalg.vecdot(p, p)
        entropy = -torch.linalg.vecdot(p, log_p)
        collision.append(squares)
        discriminant.append(entropy * squares + torch.linalg.vecdot(p * p, log_p))
    return VocabularySums(torch.cat(collision), torch.cat(discriminant))
