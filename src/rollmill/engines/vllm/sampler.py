"""vLLM's sampler with what training needs to know of truncation. Runs in the processes that vLLM starts.

Shapes: R requests that are sampled in a step, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler


class TruncationSampler(Sampler):  # type: ignore[misc]
    """Samples as vLLM does. Where top_p, top_k or min_p leave tokens out, log-probs are those without them, and the log
    of the probability mass that they keep comes along: its bits stand in place of the sampled token's rank.

    vLLM itself returns log-probs either of all tokens at temperature 1, or of the kept ones at the request's.
    """

    _kept_R: Tensor | None = None

    @classmethod
    def install(cls, runner: Any) -> bool:
        """Replace the sampler of vLLM's model runner. False if that has another kind, or verifies drafts."""
        if type(getattr(runner, "sampler", None)) is not Sampler or getattr(runner, "speculative_config", None):
            return False
        runner.sampler.__class__ = cls
        return True

    def sample(self, logits: Tensor, sampling_metadata: Any, *rest: Any) -> tuple[Tensor, Tensor | None]:
        """Return the sampled tokens [R] and log-probs [R, V], as vLLM's sampler does."""
        metadata = sampling_metadata
        least = [each for each in metadata.logitsprocs.argmax_invariant if getattr(each, "min_p_count", 1)]
        truncated = metadata.top_p is not None or metadata.top_k is not None or least
        if metadata.all_greedy or metadata.max_num_logprobs is None or not truncated:
            return super().sample(logits, metadata, *rest)  # type: ignore[no-any-return]
        whole_RV = self.apply_temperature(logits.clone(), metadata.temperature, metadata.all_random)
        whole_RV = whole_RV.log_softmax(dim=-1, dtype=torch.float32)
        sampled_R, kept_RV = super().sample(logits, metadata, *rest)
        index_R1 = sampled_R.long().unsqueeze(1)
        self._kept_R = (whole_RV.gather(1, index_R1) - kept_RV.gather(1, index_R1)).squeeze(1)
        return sampled_R, whole_RV

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:  # static in vLLM
        """Return vLLM's LogprobsTensors of the sampled tokens and the `num_logprobs` likeliest."""
        found = super().gather_logprobs(logprobs, num_logprobs, token_ids)
        kept_R, self._kept_R = self._kept_R, None
        return found if kept_R is None else found._replace(selected_token_ranks=kept_R.view(torch.int32))
