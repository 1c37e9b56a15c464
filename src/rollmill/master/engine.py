"""The rollout engine on the policy that is trained."""

from __future__ import annotations

import torch

from rollmill.config.rollout import RolloutConfig
from rollmill.engines.native import NativeEngine
from rollmill.models.load import Policy


def native_engine(policy: Policy, rollout: RolloutConfig, precision: str) -> NativeEngine:
    """The native engine, which computes in `precision` (bf16 or fp32) with the policy's own parameters."""
    return NativeEngine(
        policy.model,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        max_sequences=rollout.max_sequences,
        prefill_tokens=rollout.prefill_tokens,
    )
