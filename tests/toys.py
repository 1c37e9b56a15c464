"""Toy models in fp32: real transformers architectures at the size of a test."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CONTEXT = 256


def toy_model(architecture: str, vocab_size: int = 130, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A randomly initialised model whose next-token distributions are far from uniform; in eval mode."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": vocab_size,
        "initializer_range": 0.15,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | overrides
    makers: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
        "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "sliding_window": 8}),
    }
    model_class, config_class, special = makers[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**(special | sizes)))
    return model.eval()
