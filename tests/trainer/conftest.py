"""Toy models and made-up batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollmill.types import Experience, ExperienceSource

VOCAB = 23
_CLASSES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
}


def _toy(architecture: str, *, seed: int = 0, **changes: Any) -> Any:
    config, model = _CLASSES[architecture]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    return getattr(transformers, model)(getattr(transformers, config)(**{**settings, **changes})).eval()


def _experience(
    rng: np.random.Generator,
    prompt: np.ndarray,
    length: int,
    *,
    group: str,
    index: int,
    reward: float | None,
    version: int = 0,
    expert: bool = False,
    hole: bool = False,
) -> Experience:
    tokens = np.concatenate([prompt, rng.integers(2, VOCAB, length)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    if hole:  # an observation in the middle of a multi-turn trajectory
        mask[len(prompt) + length // 3 : len(prompt) + length // 2] = False
    return Experience(
        id=f"{group}-{index}",
        task_id=f"task-{group}",
        group=group,
        token_ids=tokens,
        action_mask=mask,
        logprobs=np.where(mask, rng.normal(-3, 0.3, len(tokens)), 0).astype(np.float32),
        versions=np.where(mask & (not expert), version, -1).astype(np.int32),
        reward=reward,
        source=ExperienceSource.EXPERT if expert else ExperienceSource.ROLLOUT,
        temperature=0.8,
    )


def _batch(
    *, seed: int = 0, groups: int = 3, size: int = 4, demonstrations: int = 0, version: int = 0
) -> list[Experience]:
    rng = np.random.default_rng(seed)
    batch = []
    for g in range(groups):
        prompt = rng.integers(2, VOCAB, int(rng.integers(1, 9)))
        for i in range(size):
            batch.append(
                _experience(
                    rng,
                    prompt,
                    int(rng.integers(1, 20)),
                    group=f"g{g}",
                    index=i,
                    reward=float(rng.integers(0, 2)) if i > 1 else float(i),
                    version=version,
                    hole=i == 2,
                )
            )
    for i in range(demonstrations):
        prompt = rng.integers(2, VOCAB, 4)
        batch.append(
            _experience(rng, prompt, int(rng.integers(3, 15)), group=f"x{i}", index=i, reward=None, expert=True)
        )
    order = rng.permutation(len(batch))
    return [batch[i] for i in order]


@pytest.fixture(scope="session")
def toy() -> Callable[..., Any]:
    """toy(architecture, seed=, **config): a two-layer causal LM in fp32."""
    return _toy


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., list[Experience]]:
    """make_batch(seed=, groups=, size=, demonstrations=, version=): ragged experiences, shuffled, shared prompts."""
    return _batch
