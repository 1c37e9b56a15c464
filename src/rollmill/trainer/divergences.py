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

from rollmill.algorithms.distillation import (
    distillation_advantage,
    forward_kl,
    generalised_jsd,
    jsd_advantage,
    reverse_kl,
)
from rollmill.algorithms.losses import policy_gradient
from rollmill.recipes import DistillationOptions
from rollmill.trainer.logprobs import CHUNK_LOGITS, compute_logits

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


def compute_divergences(
    policy: Any,
    teacher: Any,
    hidden_Td: Tensor,
    rows_M: Tensor,
    teacher_hidden_Md: Tensor,
    target_M: Tensor,
    options: DistillationOptions,
    *,
    chunk: int | None = None,
) -> Tensor:
    """A term per prediction, [M], with gradient to the policy; backward recomputes the logits chunk by chunk.

    Args:
        policy, teacher: causal LMs with the same vocabulary, whose last hidden states are given.
        rows_M: rows of the policy's hidden states that predict.
        teacher_hidden_Md: the teacher's hidden states that predict the same tokens, maybe after another prompt.
        target_M: the sampled tokens.
        chunk: rows of logits that exist at a time; None: as many as take 256 MiB in float32, at most 1024.
    """
    divergence = _divergence(options)
    vocabulary = policy.get_output_embeddings().weight.shape[0]
    step = chunk or max(1, min(1024, CHUNK_LOGITS // vocabulary))

    def of_chunk(hidden_Cd: Tensor, teacher_Cd: Tensor, target_C: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_CV = torch.log_softmax(compute_logits(teacher, teacher_Cd), -1)
        return divergence(torch.log_softmax(compute_logits(policy, hidden_Cd), -1), teacher_CV, target_C)

    parts = []
    for rows, teacher_Cd, target in zip(
        rows_M.split(step), teacher_hidden_Md.split(step), target_M.split(step), strict=True
    ):
        inputs = (hidden_Td.index_select(0, rows), teacher_Cd, target)
        parts.append(checkpoint(of_chunk, *inputs, use_reentrant=False))
    return torch.cat(parts)


def _divergence(options: DistillationOptions) -> Divergence:
    functions: dict[str, Callable[..., Tensor]] = {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "jsd": partial(generalised_jsd, beta=options.beta),
    }
    if options.divergence in ("sampled", "sampled_jsd"):
        advantage = distillation_advantage
        if options.divergence == "sampled_jsd":
            advantage = partial(jsd_advantage, beta=options.beta)
        return partial(_sampled, advantage)
    function = functions[options.divergence]
    return lambda policy_CV, teacher_CV, _: function(policy_CV, teacher_CV, temperature=options.temperature)


def _sampled(
    advantage: Callable[[Tensor, Tensor], Tensor], policy_CV: Tensor, teacher_CV: Tensor, target_C: Tensor
) -> Tensor:
    logprob, teacher = (x.gather(1, target_C[:, None])[:, 0] for x in (policy_CV, teacher_CV))
    return policy_gradient(logprob, advantage(logprob, teacher))
