"""Builds the native engine from its section of the run file, or with its defaults."""

from __future__ import annotations

from typing import Literal

import torch

from rollmill.config.engines import NativeEngineConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.engines.base import EngineUse
from rollmill.engines.native.engine import NativeEngine
from rollmill.models.load import PolicyModel

_RESERVED, _SHARE = 0.1, 0.5  # of a GPU's memory; of what is free beyond that: gradients and optimizer come later


def build_native(
    section: NativeEngineConfig,
    policy: PolicyModel,
    rollout: RolloutConfig,
    precision: str,
    use: EngineUse = EngineUse(),
) -> NativeEngine:
    """Build the native engine, with the policy's own parameters if it can decode with them; it computes in `precision`
    (bf16 or fp32).
    """
    return NativeEngine(
        policy.model,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        max_sequences=rollout.max_sequences,
        prefill_tokens=rollout.prefill_tokens,
        keep=section.after_update == "keep",
        record_routing=use.record_routing,
        prefix_cache_bytes=int(section.prefix_cache_gb * 2**30),
        int8=section.weights == "int8",
        device=policy.device,
        cache_gb=resolve_cache_gb(section.cache_gb, policy.device),
    )


def resolve_cache_gb(limit: float | Literal["auto"], device: torch.device) -> float | None:
    """Return the limit of the KV cache in GiB; None: there is none.

    `auto` is left to engines beside the policy's, such as those of further models: for that one the run has chosen.
    """
    if limit != "auto":
        return limit
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(free - _RESERVED * total, 0.0) * _SHARE / 2**30
