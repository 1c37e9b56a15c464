"""Divergences between the policy's and a teacher's next-token distributions, without holding [tokens, vocabulary].

Shapes: T tokens of the row, M predictions that count, C rows of a chunk, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollmill.algorithms.distillation import distillation_advantage, forward_kl, generalised_jsd, reverse_kl
from rollmill.algorithms.losses import policy_gradient
from rollmill.recipes.distill import Distill
from rollmill.trainer.logprobs import CHUNK, logits_of

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


def token_divergences(
    policy: Any,
    teacher: Any,
    hidden_Td: Tensor,
    teacher_hidden_Td: Tensor,
    rows_M: Tensor,
    target_M: Tensor,
    options: Distill,
    *,
    chunk: int | None = None,
) -> Tensor:
    """A term per prediction, [M], with gradient to the policy; backward recomputes the logits chunk by chunk.

    Args:
        policy, teacher: causal LMs with the same vocabulary, whose last hidden states are given.
        rows_M: rows of the hidden states that predict.
        target_M: the sampled tokens.
        chunk: rows of logits that exist at a time; None: as many as take 256 MiB in float32, at most 1024.
    """
    divergence = _divergence(options)
    vocabulary = policy.get_output_embeddings().weight.shape[0]
    step = chunk or max(1, min(1024, CHUNK // vocabulary))

    def of_chunk(hidden_Cd: Tensor, teacher_Cd: Tensor, target_C: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_CV = torch.log_softmax(logits_of(teacher, teacher_Cd), -1)
        return divergence(torch.log_softmax(logits_of(policy, hidden_Cd), -1), teacher_CV, target_C)

    parts = []
    for rows, target in zip(rows_M.split(step), target_M.split(step), strict=True):
        inputs = (hidden_Td.index_select(0, rows), teacher_hidden_Td.index_select(0, rows), target)
        parts.append(checkpoint(of_chunk, *inputs, use_reentrant=False))
    return torch.cat(parts)


def _divergence(options: Distill) -> Divergence:
    functions: dict[str, Callable[..., Tensor]] = {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "jsd": partial(generalised_jsd, beta=options.beta),
    }
    if options.divergence == "sampled":
        return _sampled
    function = functions[options.divergence]
    return lambda policy_CV, teacher_CV, _: function(policy_CV, teacher_CV, temperature=options.temperature)


def _sampled(policy_CV: Tensor, teacher_CV: Tensor, target_C: Tensor) -> Tensor:
    logprob, teacher = (x.gather(1, target_C[:, None])[:, 0] for x in (policy_CV, teacher_CV))
    return policy_gradient(logprob, distillation_advantage(logprob, teacher))
