"""Benchmark models: Qwen3 shapes with random weights, created once in a cache folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A Qwen3 configuration."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int
    initializer_range: float


SHAPES = {
    "tiny": Shape(64, 2, 2, 1, 128, 256, 32, 0.05),  # 0.1M, for the benchmarks' own tests
    "m3": Shape(256, 4, 4, 2, 512, 3200, 64, 0.05),  # 3.2M
    "m25": Shape(512, 8, 8, 4, 1344, 4096, 64, 0.05),  # 24.9M
    "m600": Shape(1024, 28, 16, 8, 3072, 151_936, 128, 0.02),  # 596M, the shape of Qwen3-0.6B
}


def cache_dir() -> Path:
    """$ROLLMILL_BENCH_CACHE, or ~/.cache/rollmill-bench."""
    return Path(os.environ.get("ROLLMILL_BENCH_CACHE", "~/.cache/rollmill-bench")).expanduser()


def model_dir(name: str) -> Path:
    """Folder of benchmark model `name` in Hugging Face format with a word-level tokenizer; created if absent.

    The EOS id is one past the vocabulary: no sampler can produce it, so that completions have the same length on
    every side without a logits processor, which would cost time.
    """
    shape = SHAPES[name]
    folder = cache_dir() / f"{name}-{'-'.join(str(value) for value in shape)}"
    if not folder.exists():
        draft = folder.with_name(folder.name + f".{os.getpid()}")
        _write_model(draft, shape)
        _write_tokenizer(draft, shape.vocab_size)
        try:
            draft.rename(folder)
        except OSError:  # another process finished first
            shutil.rmtree(draft)
    return folder


def _write_model(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **shape._asdict(),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=shape.vocab_size,
    )
    model: Any = Qwen3ForCausalLM(config)
    dtype = torch.bfloat16 if shape.hidden_size >= 1024 else torch.float32
    model.to(dtype).save_pretrained(folder)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, **{f"w{index}": index for index in range(1, vocab_size)}, "<eos>": vocab_size}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    ).save_pretrained(folder)


PROMPT = 20
"""Default number of prompt tokens in benchmarks of whole steps."""


def prompts(name: str, count: int, length: int) -> list[list[int]]:
    """`count` random prompts of `length` token ids, the same on every side."""
    import random

    source = random.Random(0)
    return [[source.randrange(1, SHAPES[name].vocab_size) for _ in range(length)] for _ in range(count)]
