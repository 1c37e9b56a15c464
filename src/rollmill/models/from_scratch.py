"""Making a model from scratch, and writing a model as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from rollmill.config.model import NewModelConfig
from rollmill.models.lora import ADAPTER_FOLDER, has_lora, merged_model, save_adapter

_CONFIGS: dict[str, Any] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "gemma": GemmaConfig}


def init_model(config: NewModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A randomly initialised model in fp32 on the CPU for a tokenizer.

    The weights depend on `config`, the vocabulary's size and `seed` only; torch's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_architecture(config, tokenizer), dtype=torch.float32)
    return model


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a Hugging Face directory (safetensors, generation_config.json, tokenizer), which any program can load.

    With LoRA the weights are the merged ones, and `adapter/` holds the adapters alone.

    transformers' AutoTokenizer replaces a generic tokenizer (one we trained) by its own for architecture qwen2; there,
    other programs load it as PreTrainedTokenizerFast.

    Raises OSError (or safetensors' own error) when the directory cannot be written.
    """
    with silence_transformers():
        if has_lora(model):
            save_adapter(model, directory / ADAPTER_FOLDER)
        plain: Any = merged_model(model) if has_lora(model) else model
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars and no reports from transformers; its exceptions pass."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def _architecture(config: NewModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    made: PreTrainedConfig = _CONFIGS[config.architecture](
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.heads,
        max_position_embeddings=config.context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return made
