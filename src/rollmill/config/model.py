"""`model`: which checkpoint to train, or how to make a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.section import Endpoint, Section


class TokenizerConfig(Section):
    """A tokenizer trained on the taskset's own text, for a model made from scratch."""

    kind: Literal["char", "bpe"] = "bpe"
    """`char`: one token per character seen in the taskset; `bpe`: byte-level BPE, which covers any text."""
    vocab_size: int = Field(4096, ge=260, le=2**24)
    """Upper bound on the BPE vocabulary (256 bytes and the special tokens included). Only for kind: bpe."""


class NewModelConfig(Section):
    """A randomly initialised model (used when `model.path` is `new`)."""

    architecture: Literal["qwen3", "qwen2", "llama", "gemma"] = "qwen3"
    """Family of the network."""
    hidden_size: int = Field(256, ge=8, le=2**16)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1, le=1000)
    """Transformer layers."""
    heads: int = Field(4, ge=1, le=2**12)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Key-value heads; must divide heads."""
    head_dim: int | None = Field(None, ge=2, le=2**12)
    """Defaults to hidden_size / heads."""
    intermediate_size: int | None = Field(None, ge=1, le=2**20)
    """Defaults to 3 x hidden_size."""
    context: int = Field(1024, ge=8, le=2**31)
    """Longest sequence the model accepts (max_position_embeddings)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output layer, too."""
    initializer_range: float = Field(0.05, gt=0)
    """Standard deviation of the initial weights; small models learn far slower with the customary 0.02."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class LoRAConfig(Section):
    """Low-rank adapters on a frozen checkpoint (extra `lora`), merged for rollouts."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32, gt=0)
    """The adapters' product is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the adapted layers, such as q_proj; or all linear layers but the output layer. Not for experts."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732)."""


class ModelConfig(Section):
    """The model to train."""

    path: Path | Literal["new"] = "new"
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer), or `new`: make one from `model.new`."""
    new: NewModelConfig | None = None
    """Recipe for a new model; used only when `model.path` is `new`."""
    trust_remote_code: bool = False
    """Run model code found in the checkpoint directory."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of all weights. Only with a checkpoint folder."""


# `models`: models besides the policy that workflows talk to.

_OF_ENDPOINTS = ("model", "api_key_env", "completes", "options", "max_in_flight", "tries", "try_s", "deadline_s")


class AuxiliaryModelConfig(Section):
    """A model that does not learn: give one of path, policy and endpoint."""

    path: Path | None = None
    """A Hugging Face checkpoint folder, which rollmill's own engine decodes."""
    policy: Literal["initial"] | None = None
    """`initial`: a frozen copy of the policy as it is at the start of the stage."""
    endpoint: Endpoint | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str | None = None
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the endpoint's key. The key itself stands in no file and no log."""
    completes: bool = False
    """The endpoint goes on from texts, too (`/completions`), and has a `complete`. Otherwise it only chats."""
    temperature: float = Field(1.0, ge=0)
    """How its replies are sampled, unless the workflow says otherwise."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest reply in tokens, unless the workflow says otherwise."""
    options: dict[str, Any] = {}
    """Further fields of the request's body."""
    max_in_flight: int = Field(32, ge=1)
    """Most requests to the endpoint at the same time."""
    tries: int = Field(8, ge=1)
    """How often a request is sent before it has failed."""
    try_s: float = Field(60.0, gt=0)
    """Longest wait for the answer to one try."""
    deadline_s: float = Field(180.0, gt=0)
    """Longest time for all tries of a request."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "policy", "endpoint") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, policy and endpoint (found {' and '.join(given) or 'none'})")
        if self.endpoint is not None:
            if self.model is None:
                raise ValueError("model: an endpoint needs the name of a model")
            return self
        fields = type(self).model_fields
        for key in _OF_ENDPOINTS:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with endpoint, not with {given[0]}; remove it")
        return self
