"""Distillation: the teacher model, and divergences between its next-token distributions and the policy's.

The teacher is another model, or the policy itself with other weights or another prompt. Divergences are computed in
chunks, so that [tokens, vocabulary] never exists at once.

Shapes: T tokens of the row, M predictions (action tokens of a micro-batch), C rows of a chunk, V vocabulary, d hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollmill.algorithms.kl import (
    distillation_advantage,
    forward_kl,
    generalised_jsd,
    jsd_advantage,
    reverse_kl,
)
from rollmill.algorithms.losses import policy_gradient
from rollmill.config.algorithms.distillation import DistillationOptions, SelfDistill
from rollmill.trainer.batch import MicroBatch, build_micro_batches, build_token_table
from rollmill.trainer.logprobs import CHUNK_LOGITS, ForwardPasses, compute_logits, use_packed_attention
from rollmill.trainer.reference import ReferenceModel
from rollmill.types import Experience


class Teacher:
    """A frozen model, or the policy with the average of its weights, its current or its initial weights.

    Args:
        given: teacher model, for a recipe with a separate teacher.
    """

    def __init__(
        self,
        policy: nn.Module,
        given: nn.Module | None,
        options: DistillationOptions,
        passes: ForwardPasses,
        device: torch.device,
    ) -> None:
        assert given is not None or isinstance(options, SelfDistill), "a recipe that distils needs a teacher"
        self._policy, self._passes = policy, passes
        self._rate: float | None = None
        self._weights: ReferenceModel | None = None  #: None: the policy's current weights
        if not isinstance(options, SelfDistill):
            self._weights = ReferenceModel(policy, given, device)
        elif options.weights != "current":
            self._weights = ReferenceModel(policy, None, device)
            self._rate = options.rate if options.weights == "ema" else None

    @property
    def model(self) -> nn.Module:
        """The model whose output layer turns the hidden states into logits."""
        own = None if self._weights is None else self._weights.model
        return self._policy if own is None else own

    @property
    def own_model(self) -> nn.Module | None:
        """The model kept beside the policy, if any."""
        return None if self._weights is None else self._weights.model

    def hidden(self, experiences: Sequence[Experience], micro: MicroBatch) -> Tensor:
        """Hidden states that predict a micro-batch's action tokens on this rank, without gradient: [m, d].

        An experience with a `teacher_prompt` is read after that prompt, others after their own.
        """
        members = [experiences[i] for i in micro.experiences]
        with torch.no_grad(), self._active() as model:
            if all(e.teacher_prompt is None for e in members):
                with use_packed_attention(model, micro):
                    return self._passes.hidden(model, micro).index_select(0, micro.own_rows)
            device = micro.rows.device
            read = [_after_teacher_prompt(e) for e in members]
            table = build_token_table(read, device)  # its tokens are in the order of the micro-batch's
            hidden_Md: Tensor | None = None
            for row in build_micro_batches(
                read, table, range(len(read)), self._passes.config.micro_batch_tokens, device
            ):
                with use_packed_attention(model, row):
                    found = self._passes.hidden(model, row).index_select(0, row.rows)
                if hidden_Md is None:
                    hidden_Md = found.new_zeros(len(table.target), found.shape[1])
                hidden_Md[row.tokens] = found
        assert hidden_Md is not None
        return micro.own(hidden_Md)

    def follow(self) -> None:
        """Updates the moving average with the current policy, if there is one."""
        if self._rate is not None:
            assert self._weights is not None
            self._weights.follow(self._rate)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the weights for a checkpoint; None for a given model and for the policy's current weights."""
        return None if self._weights is None else self._weights.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._weights is not None:
            self._weights.load_state_dict(state)

    @contextmanager
    def _active(self) -> Iterator[nn.Module]:
        if self._weights is None:
            yield self._policy
            return
        with self._weights.active() as model:
            yield model


def _after_teacher_prompt(e: Experience) -> Experience:
    if e.teacher_prompt is None:
        return e
    start, prompt = int(np.argmax(e.action_mask)), e.teacher_prompt
    token_ids = np.concatenate([prompt, e.token_ids[start:]]).astype(np.int32)
    return replace(
        e,
        token_ids=token_ids,
        action_mask=np.concatenate([np.zeros(len(prompt), bool), e.action_mask[start:]]),
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), -1, np.int32),
        pictures=e.teacher_pictures,
    )


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
    """Divergence per prediction, [M], with gradient to the policy; backward recomputes the logits chunk by chunk.

    Args:
        policy, teacher: causal LMs with the same vocabulary, whose last hidden states are given.
        rows_M: rows of the policy's hidden states that predict.
        teacher_hidden_Md: the teacher's hidden states that predict the same tokens, possibly after another prompt.
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
