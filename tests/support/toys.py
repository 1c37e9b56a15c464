"""Toy models in fp32: real transformers architectures at the size of a test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollmill.config.model import TokenizerConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.models.from_scratch import save_policy, train_tokenizer
from rollmill.types import Completion

CONTEXT = 256
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


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
        "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 16, "num_experts": 6, **MOE}),
        "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }
    model_class, config_class, special = makers[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**(special | sizes)))
    return model.eval()


def toy_tokenizer(kind: str = "bpe") -> PreTrainedTokenizerFast:
    """A trained tokenizer of about 300 tokens (bpe), or one token per printable ASCII character (char)."""
    texts = ["".join(map(chr, range(32, 127))), *["how many apples are there? the answer is 12\n"] * 4]
    return train_tokenizer(TokenizerConfig(kind=kind, vocab_size=300), texts)  # type: ignore[arg-type]


def toy_checkpoint(path: Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a toy model and a fitting tokenizer as a Hugging Face directory; returns `path`."""
    tokenizer = toy_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = toy_model(architecture, len(tokenizer), seed, **(special | overrides))
    save_policy(model, tokenizer, path)
    return path


def sampled_completions(engine: NativeEngine) -> list[Completion]:
    """Completions of prompts of 9, 18 and 36 tokens, three of each."""
    sampling = SamplingConfig(max_new_tokens=40)
    requests = [GenerationRequest(list(range(5, 5 + 9 * n)), sampling, n=3, seed=n) for n in (1, 2, 4)]

    async def main() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return [completion for group in asyncio.run(main()) for completion in group]
