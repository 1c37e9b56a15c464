"""Shapes of public models by name, so that a run can be planned before its checkpoint is here.

Sizes are those of the models' published config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.model import ModelConfig, NewModelConfig, TokenizerConfig
from rollmill.config.resolve import RUN_KEYS, STAGE_KEYS
from rollmill.errors import ConfigError


class ModelShape(NamedTuple):
    """Sizes of a dense decoder; `head_dim` None means width / heads."""

    architecture: str
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_dim: int | None = None


MODEL_SHAPES = {
    "qwen3-0.6b": ModelShape("qwen3", 1024, 3072, 28, 16, 8, 151936, True, 128),
    "qwen3-1.7b": ModelShape("qwen3", 2048, 6144, 28, 16, 8, 151936, True, 128),
    "qwen3-4b": ModelShape("qwen3", 2560, 9728, 36, 32, 8, 151936, True, 128),
    "qwen3-8b": ModelShape("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 128),
    "qwen3-14b": ModelShape("qwen3", 5120, 17408, 40, 40, 8, 151936, False, 128),
    "qwen3-32b": ModelShape("qwen3", 5120, 25600, 64, 64, 8, 151936, False, 128),
    "qwen2.5-0.5b": ModelShape("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": ModelShape("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": ModelShape("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": ModelShape("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": ModelShape("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": ModelShape("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": ModelShape("qwen2", 8192, 29568, 80, 64, 8, 152064, False),
    "llama-3.2-1b": ModelShape("llama", 2048, 8192, 16, 32, 8, 128256, True, 64),
    "llama-3.2-3b": ModelShape("llama", 3072, 8192, 28, 24, 8, 128256, True, 128),
    "llama-3.1-8b": ModelShape("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "llama-3.1-70b": ModelShape("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "smollm2-135m": ModelShape("llama", 576, 1536, 30, 9, 3, 49152, True),
    "smollm2-360m": ModelShape("llama", 960, 2560, 32, 15, 5, 49152, True),
    "smollm2-1.7b": ModelShape("llama", 2048, 8192, 24, 32, 32, 49152, True),
}


_CONTEXT = 1 << 17
"""Longer than any sequence that is planned; it changes no size."""
_CHECKED = (RUN_KEYS | STAGE_KEYS) - {"model"}


def load_planned_run(path: Path, overrides: Sequence[str], model: str | None) -> LoadedRun:
    """Loads a run file to plan it; with another `model`, its files need not be here and its own model is not checked.

    Raises ConfigError like `load_run`.
    """
    if model is None:
        return load_run(path, overrides)
    return load_run(path, overrides, require_files=False, keys=_CHECKED)


def planned_model(name: str | None, own: ModelConfig) -> ModelConfig:
    """Returns the model to plan for: the run file's own, a preset's, or that of a folder or an id of the hub. Adapters
    stay the run file's.

    Raises ConfigError if `name` is none of these.
    """
    if name is None:
        return own
    shape = MODEL_SHAPES.get(name.lower())
    if shape is None:
        if not Path(name).is_dir() and not name.startswith("hf://"):
            raise ConfigError(
                f"--model {name}: neither a checkpoint's folder, hf://ORG/NAME nor a known model; known are "
                f"{', '.join(MODEL_SHAPES)}"
            )
        return ModelConfig(path=Path(name), lora=own.lora, quantization=own.quantization)
    new = {
        "architecture": shape.architecture,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_embeddings": shape.tied,
        "context": _CONTEXT,
        "tokenizer": TokenizerConfig(kind="bpe", vocab_size=shape.vocabulary),
    }
    return ModelConfig(path="new", new=NewModelConfig.model_validate(new), lora=own.lora, quantization=own.quantization)
