"""`model` and `models`: the model to train, and further models that workflows call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.section import Endpoint, Section


class TokenizerConfig(Section):
    """A tokenizer trained on the taskset's text, for a new model."""

    kind: Literal["char", "bpe"] = "bpe"
    """`char`: one token per character seen in the taskset; `bpe`: byte-level BPE, which covers any text."""
    vocab_size: int = Field(4096, ge=260, le=2**24)
    """Maximum size of the BPE vocabulary (256 bytes and the special tokens included). Only for kind: bpe."""

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured by kind `char`, whose vocabulary is the characters seen; it is by `bpe`"
        return {"vocab_size": text} if self.kind == "char" else {}


class NewModelConfig(Section):
    """A randomly initialised model (used when `model.path` is `new`)."""

    architecture: Literal["qwen3", "qwen2", "llama", "gemma"] = "qwen3"
    """Architecture of the network."""
    hidden_size: int = Field(256, ge=8, le=2**16)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1, le=1000)
    """Number of transformer layers."""
    heads: int = Field(4, ge=1, le=2**12)
    """Number of attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Number of key-value heads; must divide heads."""
    head_dim: int | None = Field(None, ge=2, le=2**12)
    """Defaults to hidden_size / heads."""
    intermediate_size: int | None = Field(None, ge=1, le=2**20)
    """Defaults to 3 x hidden_size."""
    context: int = Field(1024, ge=8, le=2**31)
    """Longest sequence the model accepts (max_position_embeddings)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output layer."""
    initializer_range: float = Field(0.05, gt=0)
    """Standard deviation of the initial weights; small models learn far slower with the customary 0.02."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class LoRAConfig(Section):
    """Low-rank adapters on a frozen checkpoint (extra `lora`)."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32, gt=0)
    """The adapters' product is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers to adapt, such as q_proj, or all linear layers but the output layer. Experts are not
    supported."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    merge: bool = True
    """Merge adapters for rollouts: engine `native` decodes with a copy of the adapted weights. `false`: it decodes with
    the trainer's weights and adapters, which takes no memory and longer. Other engines, and checkpoints, have merged
    weights in any case."""


class ModelConfig(Section):
    """The model to train."""

    path: Path | Literal["new"] = "new"
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer), a GGUF file or a folder with one (extra
    `gguf`), a model of the Hugging Face hub (`hf://ORG/NAME[@REVISION]`), or `new` to create one from `model.new`."""
    new: NewModelConfig | None = None
    """Recipe for a new model; used only when `model.path` is `new`."""
    trust_remote_code: bool = False
    """Run model code found in the checkpoint folder."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of all weights. Only with a checkpoint folder."""
    quantization: Literal["int8", "nf4"] | None = None
    """Quantise the frozen linear layers below the adapters (QLoRA, arXiv:2305.14314), for training and rollouts.
    `int8`: a scale per row. `nf4`: 4 bits in blocks of 64, whose scales are quantised, too (extra `quantization`).
    Checkpoints have the adapters, and the original weights with adapters merged."""

    def extras(self) -> dict[str, tuple[str, str]]:
        needed = {} if self.lora is None else {"lora": ("lora", "peft")}
        return needed | ({"quantization": ("quantization", "bitsandbytes")} if self.quantization == "nf4" else {})

    def unused_keys(self) -> dict[str, str]:
        if self.path != "new":
            return {}
        return {
            "trust_remote_code": "not honoured by a new model; it is when model.path is a checkpoint folder",
            "lora": "adapters need trained weights; it is honoured when model.path is a checkpoint folder",
            "quantization": "only frozen weights are quantised, and a new model has none; give a checkpoint folder",
        }

    def conflicts(self) -> dict[str, str]:
        if self.quantization is not None and self.lora is None:
            return {"quantization": "quantised weights are not trained; add `lora`, whose adapters are, or remove this"}
        if isinstance(self.path, Path):
            other = self.path.is_file() and self.path.suffix != ".gguf"
            return {"path": f"{self.path} is a file; give the checkpoint's folder, or a .gguf file"} if other else {}
        return {}


# Auxiliary models

_ENDPOINT_KEYS = (
    "model",
    "api_key_env",
    "completes",
    "options",
    "max_in_flight",
    "tries",
    "try_s",
    "deadline_s",
    "away_s",
)


_PAST_KEYS = ("every", "keep", "latest")


class AuxiliaryModelConfig(Section):
    """A model that is not trained. Give exactly one of path, policy and endpoint."""

    path: Path | None = None
    """A Hugging Face checkpoint folder, served by the native engine."""
    policy: Literal["initial", "past"] | None = None
    """`initial`: a frozen copy of the policy as it was at the start of the stage. `past`: every rollout draws one of
    the newest copies of the policy, or the current policy."""
    every: int = Field(10, ge=1)
    """With policy: past, a copy is taken every N training steps of the stage. The first copy is the policy at the start
    of the stage."""
    keep: int = Field(4, ge=1)
    """With policy: past, how many of the newest copies are kept, in memory and in checkpoints."""
    latest: float = Field(0.5, ge=0, lt=1)
    """With policy: past, the probability that a rollout draws the current policy. The copies share the rest equally."""
    endpoint: Endpoint | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str | None = None
    """Model name at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable with the endpoint's API key. The key itself is never written to a file or
    log."""
    completes: bool = False
    """Whether the endpoint also supports text completions (`/completions`), offered as `complete`. Otherwise it only
    chats."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature, unless the workflow sets one."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum reply length in tokens, unless the workflow sets one."""
    options: dict[str, Any] = {}
    """Additional fields of the request body."""
    max_in_flight: int = Field(32, ge=1)
    """Maximum number of concurrent requests to the endpoint."""
    tries: int | None = Field(None, ge=1)
    """Maximum number of attempts per request; null: as many as fit into `deadline_s`."""
    try_s: float = Field(60.0, gt=0)
    """Timeout of one attempt."""
    deadline_s: float = Field(180.0, gt=0)
    """Timeout of a request over all attempts. The time in which the endpoint is unreachable is not counted."""
    away_s: float = Field(1800.0, gt=0)
    """Longest outage of an endpoint that has answered before. Requests wait until it is back."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {} if self.endpoint is None else {"endpoint": ("judge", "openai")}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "policy", "endpoint") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, policy and endpoint (found {' and '.join(given) or 'none'})")
        fields = type(self).model_fields
        for key in () if self.policy == "past" else _PAST_KEYS:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with policy: past, not with {self._describe_source()}; remove it")
        if self.endpoint is not None:
            if self.model is None:
                raise ValueError("model: an endpoint needs the name of a model")
            return self
        for key in _ENDPOINT_KEYS:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with endpoint, not with {given[0]}; remove it")
        return self

    def _describe_source(self) -> str:
        """The key that says where the model comes from, with its value if that is a choice."""
        return f"policy: {self.policy}" if self.policy is not None else "path" if self.path is not None else "endpoint"
