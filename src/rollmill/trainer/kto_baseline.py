"""KTO's baseline z0: the policy's log-ratio to the reference on mismatched prompt-completion pairs.

Shapes: N experiences of the batch, A action tokens of all mismatched experiences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.algorithms.preference import kto_baseline
from rollmill.trainer.batch import TokenTable
from rollmill.trainer.distributed.fsdp import call_unsharded
from rollmill.trainer.logprobs import ForwardPasses, use_packed_attention
from rollmill.types import Experience


@dataclass(frozen=True)
class KTOBaselineBatch:
    """One mismatched experience for each experience of a batch."""

    experiences: list[Experience]
    table: TokenTable
    reference: Tensor  #: [A], log-probs under the reference


def build_mismatched_experiences(experiences: Sequence[Experience], context: int | None) -> list[Experience]:
    """Combines each experience's prompt with the completion of the previous experience in the batch (the last one for
    the first).

    If the previous experience has the same prompt, the nearest earlier one with another prompt is taken instead. So the
    completions are those of the batch, as far as prompts differ (KTO, arXiv:2402.01306, section 4.2).

    Args:
        context: longest sequence of the model in tokens; longer ones are truncated. None: no truncation.
    """
    starts = [int(np.argmax(e.action_mask)) for e in experiences]
    prompts = [e.token_ids[:start].tobytes() for e, start in zip(experiences, starts, strict=True)]
    found = []
    for i, experience in enumerate(experiences):
        before = [(i - n) % len(experiences) for n in range(1, len(experiences) + 1)]
        j = next((j for j in before if prompts[j] != prompts[i]), before[0])
        own, other = slice(0, starts[i]), slice(starts[j], None)

        def joined(first: Any, second: Any, own: slice = own, other: slice = other) -> Any:
            return np.concatenate([first[own], second[other]])[:context]

        donor = experiences[j]
        token_ids = joined(experience.token_ids, donor.token_ids)
        found.append(
            replace(
                experience,
                id=f"{experience.id}/mismatched",
                token_ids=token_ids,
                action_mask=joined(experience.action_mask, donor.action_mask),
                logprobs=np.zeros(len(token_ids), np.float32),
                versions=np.full(len(token_ids), -1, np.int32),
            )
        )
    return found


@torch.no_grad()
def compute_kto_baseline(model: Any, passes: ForwardPasses, mismatched: KTOBaselineBatch, chosen: list[int]) -> Tensor:
    """Computes z0 of one optimizer step, a scalar, over the mismatched partners of the experiences `chosen` on all
    ranks.
    """
    table = mismatched.table
    logprob = torch.zeros_like(mismatched.reference)
    for micro in passes.rows(mismatched.experiences, table, chosen):
        with use_packed_attention(model, micro):
            own = call_unsharded(model, lambda: passes.predict(model, micro, table)[0])  # noqa: B023
            logprob[micro.tokens] = own.to(logprob.dtype)
    ratio = passes.ranks.add(logprob) - mismatched.reference
    summed = torch.zeros(len(mismatched.experiences), dtype=ratio.dtype, device=ratio.device)
    summed.index_add_(0, table.experience, ratio)
    return kto_baseline(summed[chosen])
