"""Forward passes of Llama-like models in fewer operations than transformers makes, for the engine.

A decode step of a small model is mostly the cost of starting some fifty operations per layer. Here the projections of
queries, keys and values are one product, queries and keys are normalised and rotated together, and residuals are added
by the products. The result is that of the model itself, apart from rounding; a model for which a comparison shows
anything else is left to transformers.

Shapes: T tokens, d hidden size, H query heads, K key-value heads, D head size, S rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollmill.errors import ModelError
from rollmill.models.attention import AttentionContext, AttentionOptions, build_forward_inputs, use_attention_context
from rollmill.models.cpu.int8 import Int8Linear, round_rows
from rollmill.models.recurrent import RecurrentCall

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
FIXED_ROTARY = frozenset({"default", "linear", "llama3"})
"""Kinds of rotary embedding whose frequencies do not depend on the sequence."""
COPIED_BYTES = 1 << 26  #: of weights that are copied to be one; larger products gain little by it
_INPUT_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of a module, with the same input
_TRIED = 8  # tokens that are compared
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Of the distance of the logits, relative to their size. In half precision the model's own are 1 to 5 % off."""


class FusedLayers:
    """The passes of one model. `refresh` has to follow each change of its weights.

    Args:
        options: of each layer's attention.
        context: number of positions. A GPU has the angles of all of them from the start: to look how many have occurred
            would make the host wait in each step.
    """

    def __init__(self, model: nn.Module, options: list[AttentionOptions], context: int) -> None:
        whole: Any = model
        network: Any = whole.model
        self._embedding, self._norm, self._head = network.embed_tokens, network.norm, whole.lm_head
        copied = sum(each.weight.nbytes for layer in network.layers for each in _inputs(layer))
        own = zip(network.layers, options, strict=True)
        self._layers = [_Layer(layer, each, copied <= COPIED_BYTES) for layer, each in own]
        self._rotary: Any = network.rotary_emb
        self._device = self._embedding.weight.device
        self._cos_PD = self._sin_PD = torch.empty(0)  # of the positions that have occurred so far
        if self._device.type != "cpu":
            self._turn(context)

    def refresh(self) -> None:
        """Copy the weights that are used as one."""
        for layer in self._layers:
            layer.refresh()

    def destroy(self) -> None:
        for layer in self._layers:
            layer.destroy()

    def forward(self, context: AttentionContext, tokens: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """Compute logits [S, V] of the rows `keep` (0: all) from tokens and positions [1, T]."""
        hidden = functional.embedding(tokens[0], self._embedding.weight)
        cos, sin = self._angles(positions[0])
        for layer in self._layers:
            hidden = layer.forward(context, hidden, cos, sin)
        if isinstance(keep, Tensor):
            hidden = hidden[keep]
        return functional.linear(_rms_norm(hidden, self._norm), self._head.weight, self._head.bias)

    def _angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, [T, 1, D]; the first half of the sines is negated."""
        if self._device.type == "cpu" and (needed := int(positions_T.max()) + 1) > len(self._cos_PD):
            self._turn(max(needed, 2 * len(self._cos_PD)))
        return self._cos_PD[positions_T, None], self._sin_PD[positions_T, None]

    def _turn(self, count: int) -> None:
        """Compute the angles of the first `count` positions."""
        cos, sin = self._rotary(self._embedding.weight[:1, None], torch.arange(count, device=self._device)[None])
        half = sin.shape[-1] // 2
        self._cos_PD, self._sin_PD = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, options: AttentionOptions, copies: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._first, self._second = layer.input_layernorm, layer.post_attention_layernorm
        self._q_norm: Any = getattr(attention, "q_norm", None)
        self._k_norm: Any = getattr(attention, "k_norm", None)
        self._out, self._down, self._act = attention.o_proj, mlp.down_proj, mlp.act_fn
        self._qkv = _Joined([attention.q_proj, attention.k_proj, attention.v_proj], copies)
        self._gate_up = _Joined([mlp.gate_proj, mlp.up_proj], copies)
        self._size: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        self._options = options
        self._qk_weight: Tensor | None = None

    def refresh(self) -> None:
        """Copy the weights that are used as one."""
        self._qkv.refresh()
        self._gate_up.refresh()
        if self._q_norm is not None:
            q, k = self._q_norm.weight, self._k_norm.weight
            self._qk_weight = _joined((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)), self._qk_weight)

    def destroy(self) -> None:
        self._qkv.destroy()
        self._gate_up.destroy()

    def forward(self, context: AttentionContext, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [T, d] -> [T, d]; cos and sin are [T, 1, D]."""
        query, key, value = (each.unflatten(-1, (-1, self._size)) for each in self._qkv(_rms_norm(hidden, self._first)))
        qk = torch.cat((query, key), 1)
        if self._qk_weight is not None:
            qk = functional.rms_norm(qk, (self._size,), None, self._q_norm.variance_epsilon) * self._qk_weight
        half = self._size // 2
        turned = torch.cat((qk[..., half:], qk[..., :half]), -1)
        qk = (qk * cos).addcmul_(turned, sin)
        q, k, v = (each.transpose(0, 1)[None] for each in (qk[:, : self._heads], qk[:, self._heads :], value))
        hidden = _add_product(hidden, context.attend(q, k, v, self._options)[0].flatten(1), self._out)
        gate, up = self._gate_up(_rms_norm(hidden, self._second))
        return _add_product(hidden, self._act(gate).mul_(up), self._down)


class _Joined:
    """Linear layers with the same input, of one product if their weights lie side by side or are copied."""

    def __init__(self, linears: list[Any], copies: bool) -> None:
        self._linears, self._copies = linears, copies and not isinstance(linears[0], Int8Linear)
        self._sizes = [each.out_features for each in linears]
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def refresh(self) -> None:
        weights = [each.weight for each in self._linears]
        if isinstance(self._linears[0], Int8Linear):
            return
        if (whole := _side_by_side(weights)) is not None:
            self._weight = whole
        elif self._copies:
            self._weight = _joined(weights, self._weight)
        if self._weight is not None and self._linears[0].bias is not None:
            self._bias = _joined([each.bias for each in self._linears], self._bias)

    def destroy(self) -> None:
        self._weight = self._bias = None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        if isinstance(self._linears[0], Int8Linear):
            rounded = round_rows(hidden)
            return [each.product(*rounded) for each in self._linears]
        if self._weight is not None:
            return torch.split(functional.linear(hidden, self._weight, self._bias), self._sizes, -1)
        return [functional.linear(hidden, each.weight, each.bias) for each in self._linears]


def build_fused_layers(model: nn.Module, context: int) -> FusedLayers | None:
    """Return the fused passes of a model with its present weights, for `context` positions.

    None if it is not of a known form, or if they do not compute the logits that the model computes.
    """
    if not _is_known(model):
        return None
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    positions = torch.arange(min(_TRIED, context), device=weight.device)[None]
    tokens = positions * 7 % len(weight)
    recorder = _Recorder()
    with use_attention_context(model, recorder):
        expected = model(**build_forward_inputs(model, tokens, positions)).logits[0].double()
    fused = FusedLayers(model, list(recorder.options), context)
    fused.refresh()
    found = fused.forward(recorder, tokens, positions, 0).double()
    return fused if (found - expected).norm() <= _TOLERANCE[weight.dtype] * expected.norm() else None


def find_weights_of_one_input(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yields weights of layers with the same input: a GPU multiplies with them at once if they lie side by side."""
    for module in model.modules():
        for names in _INPUT_LAYERS:
            layers = [getattr(module, name, None) for name in names]
            weights = [getattr(getattr(layer, "base_layer", layer), "weight", None) for layer in layers]
            found = [each for each in weights if isinstance(each, nn.Parameter)]
            if len(found) == len(names) and len({(each.dim(), each.shape[-1]) for each in found}) == 1:
                yield found


class _Recorder:
    """Attention of one sequence; keeps the options of each layer."""

    def __init__(self) -> None:
        self.options: list[AttentionOptions] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.options.append(options)
        with sdpa_kernel(SDPBackend.MATH):
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True
            )
        return attended.transpose(1, 2)

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        raise ModelError("a recurrent layer in a model without any")


def _is_known(model: Any) -> bool:
    """True for a model on one device whose modules are those of its architecture, with nothing added or replaced."""
    config = model.config
    rotary = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in MODEL_TYPES or rotary.get("rope_type") not in FIXED_ROTARY:
        return False
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return False
    for module in model.modules():
        home = "torch.nn." if type(module) is Int8Linear else type(module).__module__
        if not home.startswith(("transformers.", "torch.nn.")) or "forward" in vars(module):
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    linears = [type(each) for layer in model.model.layers for each in _linears(layer)]
    return type(model.lm_head) is nn.Linear and set(linears) in ({nn.Linear}, {Int8Linear})


def _inputs(layer: Any) -> Iterator[Any]:
    """The linear layers that are joined."""
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)


def _linears(layer: Any) -> Iterator[Any]:
    yield from (*_inputs(layer), layer.self_attn.o_proj, layer.mlp.down_proj)


def _side_by_side(weights: list[Tensor]) -> Tensor | None:
    """Weights [n, d] as one, if they lie one after the other in the same memory."""
    first, end = weights[0], weights[0].storage_offset()
    for each in weights:
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or each.storage_offset() != end or not each.is_contiguous():
            return None
        end += each.numel()
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _joined(parts: Sequence[Tensor], into: Tensor | None) -> Tensor:
    """Copies of tensors as one, in the place of earlier ones: a captured graph reads them by address."""
    return torch.cat(tuple(parts)) if into is None else torch.cat(tuple(parts), out=into)


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _add_product(hidden: Tensor, x: Tensor, linear: Any) -> Tensor:
    if isinstance(linear, Int8Linear):
        return linear(x).add_(hidden)  # type: ignore[no-any-return]
    if linear.bias is not None:
        return hidden + functional.linear(x, linear.weight, linear.bias)
    return torch.addmm(hidden, x, linear.weight.t())
