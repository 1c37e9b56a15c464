"""Bytes that a training step takes beside weights, gradients and moments, from the shape of the model.

Activations are counted by what autograd keeps of a layer of transformers under autocast: the input of each norm in
fp32 and its result, queries, keys and values, the attention's output, and four tensors of the feed-forward layer. Tests
compare the sums with steps on fake tensors, and with the allocations of real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollmill.config.trainer import TrainerConfig
from rollmill.models.lora import adapted_layers
from rollmill.models.quantization import count_weights, is_quantized
from rollmill.trainer.logprobs import CHUNK_LOGITS
from rollmill.trainer.stochastic_adamw import GPU_CHUNK

_BF16, _FP32 = 2, 4
_REPEATED = 1.25
"""Rows of keys and values per token: those of a prompt are repeated for each completion."""
_LOGIT = 10
"""Bytes of a logit of a chunk: log-probs and probabilities in fp32, and logits in bf16."""
_MOMENT = 40
"""Bytes of a weight of the part that the optimizer for bf16 weights updates at a time: fp32 values and random bits."""


@dataclass(frozen=True)
class PolicySizes:
    """Sizes of a policy that its activations follow from."""

    width: int  #: of hidden states
    layers: int
    queries: int  #: outputs of a layer's query projection
    keys: int  #: outputs of its key projection, and of that of values
    inner: int  #: width of its feed-forward layer; of a mixture of experts, that of all experts of a token
    normed: bool  #: queries and keys are normalised
    vocabulary: int
    stored: int  #: bytes of a weight outside of adapters, as the trainer keeps it
    head_learns: bool  #: the output layer does
    learns: bool  #: the layers' weights do, not adapters alone
    adapted: int  #: inputs of a layer's adapted products, added up
    layer: int  #: weights of a layer
    matrix: int  #: weights of its largest matrix
    cast: int  #: weights of all layers that autocast casts
    dequantized: bool  #: matrices are quantised, and are whole while they compute

    @classmethod
    def of(cls, model: Any) -> PolicySizes:
        """Reads the sizes of a causal LM, which may be on the meta device."""
        config = model.config.get_text_config()
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        linears = [each for each in _linears(model) if each.weight is not head]
        adapted = adapted_layers(model).values()
        outside = embedding.numel() + (0 if head is embedding else head.numel())
        return cls(
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            queries=heads * size,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
            inner=_inner(config),
            normed=any(name.endswith(("q_norm", "k_norm")) for name, _ in model.named_modules()),
            vocabulary=len(head),
            stored=embedding.element_size(),
            head_learns=head.requires_grad,
            learns=not adapted,
            adapted=sum(each.in_features for each in adapted) // config.num_hidden_layers,
            layer=(count_weights(model) - outside) // config.num_hidden_layers,
            matrix=max((each.in_features * each.out_features for each in linears), default=0),
            cast=sum(each.weight.numel() for each in linears if each.weight.dtype == torch.float32),
            dequantized=is_quantized(model),
        )

    def cache_bytes(self, precision: str) -> int:
        """Bytes of keys and values of a token."""
        return 2 * self.layers * self.keys * _width(precision)


def _linears(model: Any) -> list[Any]:
    """The linear layers of a model, adapters left out."""
    return [each for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".lora_" not in name]


def _inner(config: Any) -> int:
    experts = getattr(config, "num_experts_per_tok", None)
    own: Any = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not experts:
        return int(max(own) if isinstance(own, list) else own)
    width = getattr(config, "moe_intermediate_size", None) or own
    shared = (getattr(config, "n_shared_experts", None) or 0) * width
    return int(experts * width + (getattr(config, "shared_expert_intermediate_size", None) or shared))


def _width(precision: str) -> int:
    return _BF16 if precision == "bf16" else _FP32


@dataclass(frozen=True)
class StepWork:
    """Bytes of what a training step computes with and then frees."""

    row: float  #: of a micro-batch at its peak
    end: float  #: when all gradients exist: of the last layer of a backward pass, or of the optimizer

    def beside(self, gradients: float, *, several: bool) -> float:
        """Bytes beside all components and gradients at the peak of the step.

        Args:
            gradients: their bytes. The first micro-batch begins without them, another one (`several`) with them.
        """
        return max(self.row if several else self.row - gradients, self.end)


def training_work(
    sizes: PolicySizes,
    trainer: TrainerConfig,
    precision: str,
    tokens: float,
    *,
    on_cpu: bool = False,
    shards: int = 1,
) -> StepWork:
    """Bytes of a micro-batch of `tokens`.

    Args:
        trainer: with plain values.
        on_cpu: norms are those of models/cpu/norms.py, which keep less; an optimizer for bf16 updates few weights at a
            time.
        shards: ranks that share out the weights (`trainer.sharding: fsdp`).
    """
    compute = _width(precision)
    kept = tokens * _layer_activations(sizes, compute, on_cpu)
    casts = float(compute * sizes.cast) if precision == "bf16" else 0.0
    layer = kept + casts / sizes.layers + tokens * _passing(sizes, compute) + _matrix_gradient(sizes, compute)
    head = _head_bytes(sizes, trainer, compute, tokens)
    if trainer.gradient_checkpointing:
        row = tokens * sizes.stored * sizes.width * sizes.layers + max(head, layer)
    else:
        row = sizes.layers * kept + casts + max(head, layer - kept - casts / sizes.layers)
    end = layer
    if shards > 1:
        whole, root = sizes.stored * sizes.layer, 2 * sizes.stored * sizes.vocabulary * sizes.width
        row, end = row + 2 * root + 2 * whole, end + 2 * root + 4 * whole
    if not on_cpu and sizes.learns and (sizes.stored == _BF16 or trainer.optimizer == "adamw_8bit"):
        end = max(end, _MOMENT * min(max(sizes.matrix, sizes.vocabulary * sizes.width), GPU_CHUNK))
    return StepWork(row, end)


def forward_work(sizes: PolicySizes, trainer: TrainerConfig, precision: str, tokens: float) -> float:
    """Bytes of a forward pass of `tokens` without gradients."""
    compute = _width(precision)
    casts = float(compute * sizes.matrix) if precision == "bf16" and sizes.stored != compute else 0.0
    head = compute * sizes.vocabulary * sizes.width if sizes.stored != compute else 0
    layer = tokens * _passing(sizes, compute) + casts
    return max(layer, head + _logit_bytes(sizes, trainer, tokens))


def _layer_activations(sizes: PolicySizes, compute: int, on_cpu: bool) -> float:
    """Bytes per token that a layer keeps for its backward pass."""
    wide = sizes.stored != compute  # then each product casts its input anew
    norms = 2 * (_FP32 + sizes.stored) + (5 if wide else 2) * compute
    head_norm, products = _FP32 + compute, 4 * sizes.inner
    if on_cpu:
        norms, head_norm = 2 * (sizes.stored + compute), compute
    if not sizes.learns:  # frozen products keep no input, and each adapter has one of its own
        norms, head_norm, products = 2 * _FP32, _FP32, 3 * sizes.inner + sizes.adapted
    return (
        norms * sizes.width
        + (head_norm * (sizes.queries + sizes.keys) if sizes.normed else 0)
        + 2 * compute * (sizes.queries + _REPEATED * sizes.keys)
        + compute * products
    )


def _passing(sizes: PolicySizes, compute: int) -> float:
    """Bytes per token of what passes through a layer: gradients, or results of a forward pass."""
    return 4 * sizes.width * sizes.stored + 2 * compute * sizes.inner


def _matrix_gradient(sizes: PolicySizes, compute: int) -> float:
    """Bytes of the gradient of the largest matrix before it is added; or of its values, if it is quantised."""
    if sizes.learns:
        return sizes.matrix * (sizes.stored + (compute if sizes.stored != compute else 0))
    return 2 * compute * sizes.matrix if sizes.dequantized else 0.0


def _head_bytes(sizes: PolicySizes, trainer: TrainerConfig, compute: int, tokens: float) -> float:
    """Bytes of the output layer's passes: a chunk of logits, the weight's cast, and its gradient."""
    weights, casts = sizes.vocabulary * sizes.width, sizes.stored != compute
    per_weight = (compute if casts else 0) + ((sizes.stored + (compute if casts else 0)) if sizes.head_learns else 0)
    hidden = tokens * sizes.width * (2 * compute + 3 * sizes.stored)
    return _logit_bytes(sizes, trainer, tokens) + weights * per_weight + hidden


def _logit_bytes(sizes: PolicySizes, trainer: TrainerConfig, tokens: float) -> float:
    rows = min(tokens, trainer.logprob_chunk or max(1, min(1024, CHUNK_LOGITS // sizes.vocabulary)))
    return rows * sizes.vocabulary * _LOGIT


def gradient_sums(model: Any, precision: str) -> float:
    """Bytes of the gradient of a weight beside it, summed in fp32 by a CPU with AVX-512 but no products of bf16."""
    if precision != "bf16" or not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported():
        return 0.0
    linears = [each.weight for each in _linears(model)]
    learned = [each.numel() for each in (model.get_output_embeddings().weight, *linears) if each.requires_grad]
    return float(4 * max(learned, default=0))
