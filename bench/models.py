"""Benchmark models: Qwen3 shapes with random weights, created once in a cache folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple


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
    "m135": Shape(576, 30, 9, 3, 1536, 49_152, 64, 0.04),  # 135M, the shape of SmolLM2-135M
    "m600": Shape(1024, 28, 16, 8, 3072, 151_936, 128, 0.02),  # 596M, the shape of Qwen3-0.6B
    "m7600": Shape(4096, 36, 32, 8, 12_288, 151_936, 128, 0.02),  # 7.6B, the shape of Qwen3-8B with one embedding
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


def make_model(name: str, dtype: Any, device: str = "cpu") -> Any:
    """A benchmark model with random weights, made on the device itself, and written nowhere."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(_config(SHAPES[name]))
    finally:
        torch.set_default_dtype(before)


def set_allocator(name: str) -> None:
    """Set glibc's allocator as `rollmill run` does for a checkpoint of this size in bf16."""
    from rollmill.models.cpu.host_memory import keep_freed_blocks, return_large_blocks

    if name == "m600":
        return_large_blocks()
    else:
        keep_freed_blocks()


def _config(shape: Shape) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        **shape._asdict(),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=shape.vocab_size,
    )


def _write_model(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(_config(shape))
    dtype = torch.bfloat16 if shape.hidden_size >= 1024 else torch.float32
    model.to(dtype).save_pretrained(folder)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    _tokenizer(vocab_size, {}).save_pretrained(folder)


def _tokenizer(vocab_size: int, special: dict[str, int]) -> Any:
    """One token per word; `special` tokens are the last ones of the vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(1, vocab_size - len(special))}
    words = {"<pad>": 0, **words, **special, "<eos>": vocab_size}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


PICTURE = 112
"""Width and height of a benchmark picture in pixels: 64 tokens."""
_TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def vision_dir(name: str, family: Literal["llava", "idefics3"] = "llava") -> Path:
    """Folder of a vision-language model whose language part has the shape `name` and whose tower is as wide; created if
    absent.

    The last word is the picture token. As in `model_dir`, no completion ends early.
    """
    shape = SHAPES[name]
    folder = cache_dir() / f"{family}-{name}-{'-'.join(str(value) for value in shape)}"
    if not folder.exists():
        draft = folder.with_name(folder.name + f".{os.getpid()}")
        (_write_llava if family == "llava" else _write_idefics)(draft, shape)
        try:
            draft.rename(folder)
        except OSError:  # another process finished first
            shutil.rmtree(draft)
    return folder


def _write_llava(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    text = LlamaConfig(
        **shape._asdict(), tie_word_embeddings=False, max_position_embeddings=2048, pad_token_id=0, bos_token_id=None,
        eos_token_id=shape.vocab_size,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=shape.hidden_size, intermediate_size=2 * shape.hidden_size, num_attention_heads=4,
        num_hidden_layers=shape.num_hidden_layers, image_size=PICTURE, patch_size=14,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=shape.vocab_size - 1, vision_feature_layer=-1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = _tokenizer(shape.vocab_size, {"<image>": shape.vocab_size - 1})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": PICTURE, "width": PICTURE}
    LlavaProcessor(
        LlavaImageProcessorPil(size=size, crop_size=size), tokenizer, patch_size=14, image_token="<image>",
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def _write_idefics(folder: Path, shape: Shape) -> None:
    """Idefics3, which vLLM's CPU build runs; 256 patches of 7 x 7 pixels become 64 tokens."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special = {each: shape.vocab_size - 1 - number for number, each in enumerate(names)}
    text = {
        **shape._asdict(), "model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 2048,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": shape.vocab_size,
    }  # fmt: skip
    vision = {
        "hidden_size": shape.hidden_size, "intermediate_size": 2 * shape.hidden_size, "num_attention_heads": 4,
        "num_hidden_layers": shape.num_hidden_layers, "image_size": PICTURE, "patch_size": 7,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=special["<image>"], pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = _tokenizer(shape.vocab_size, special)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    edge = {"longest_edge": PICTURE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=64, chat_template=_TEMPLATE).save_pretrained(folder)


def shown_prompts(name: str, count: int) -> list[str]:
    """`count` random prompts of PROMPT words after the place of a picture."""
    return [f"<image> {' '.join(f'w{token}' for token in ids)}" for ids in prompts(name, count, PROMPT)]


def pictures(count: int, seed: int = 0) -> list[bytes]:
    """`count` pictures of noise as PNG, the same on every side."""
    import io
    import random

    from PIL import Image

    source = random.Random(seed)
    found = []
    for _ in range(count):
        content = io.BytesIO()
        Image.frombytes("RGB", (PICTURE, PICTURE), source.randbytes(3 * PICTURE**2)).save(content, "PNG")
        found.append(content.getvalue())
    return found


PROMPT = 20
"""Default number of prompt tokens in benchmarks of whole steps."""


def prompts(name: str, count: int, length: int) -> list[list[int]]:
    """`count` random prompts of `length` token ids, the same on every side."""
    import random

    source = random.Random(0)
    return [[source.randrange(1, SHAPES[name].vocab_size) for _ in range(length)] for _ in range(count)]
