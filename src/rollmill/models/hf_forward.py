"""Reference results from transformers' own forward pass, to verify engine and trainer against.

Shapes: n sequences, S their length, L layers, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.data.picture_prompts import PicturePrompt
from rollmill.models.vision import picture_processor

SHORT_WINDOW = 8  #: windows and chunks shrink to this, so that short sequences exceed them
_KEPT = 2  # layers kept of each kind
_SMALL = 20_000_000  # models with at most this many parameters run all layers
_WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class LogprobGap:
    """Difference between one implementation and the model's own forward pass."""

    path: str
    value: float  #: nats between a token's log-probs, or relative error of a gradient
    tolerance: float
    layer: str = ""  #: first layer whose output differs; "" if none does

    @property
    def right(self) -> bool:
        """True if the value is within the tolerance (NaN is not)."""
        return self.value <= self.tolerance


def logprob_tolerance(model: nn.Module) -> float:
    """Nats by which log-probs may differ between two orders of summation, by the type of the weights.

    In float32 most architectures of docs/guide/models.md are below 1e-5; more than 2e-4 is not a rounding error.
    """
    dtype = next(model.parameters()).dtype
    return {torch.float64: 1e-7, torch.float32: 2e-4}.get(dtype, 0.5)


def random_prompts(model: Any, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts of these lengths, the same at every call."""
    rows = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(rows, (length,), generator=generator).tolist() for length in lengths]


def picture_prompts(model: Any) -> list[PicturePrompt]:
    """Prompts of one and of two pictures, the same at every call; none for a text model."""
    processor = picture_processor(model)
    if processor is None:
        return []
    return [processor.noise_prompt([(56, 28)] * 2, 0), processor.noise_prompt([(28, 40)], 1)]


def hf_logprobs(model: Any, ids: list[list[int]], count: int, pictures: PicturePrompt | None = None) -> Tensor:
    """Log-probs of the last `count` tokens of sequences of one length, [n, count], by plain eager attention.

    With `pictures` there is one sequence, and the model's own forward pass places them.
    """
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    with _use_eager_attention(model):
        seen = {} if pictures is None else _picture_arguments(model, pictures, tokens)
        logits = model(input_ids=tokens, use_cache=False, **seen).logits[:, -count - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(2, tokens[:, -count:, None])[..., 0]


def _picture_arguments(model: Any, pictures: PicturePrompt, tokens: Tensor) -> dict[str, Tensor]:
    """Pixels and token types of one sequence, whose prompt has pictures."""
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(tokens.device, dtype if v.is_floating_point() else v.dtype) for k, v in pictures.inputs.items()}
    return inputs | token_types(model, pictures, tokens)


def token_types(model: Any, pictures: PicturePrompt, tokens: Tensor) -> dict[str, Tensor]:
    """Argument of a model's own forward pass that tells the kinds of the tokens [1, S] of a sequence."""
    pictured = (tokens == model.picture_processor.image_token_id).to(torch.int32)
    if pictures.both_ways == "prompt":
        behind = torch.arange(tokens.shape[1], device=tokens.device) >= len(pictures.token_ids)
        return {"token_type_ids": behind.to(torch.int32)[None]}
    if pictures.both_ways == "picture":
        return {"token_type_ids": pictured}
    return {"mm_token_type_ids": pictured} if hasattr(model.model, "get_rope_index") else {}


def hf_layer_outputs(model: Any, ids: list[int]) -> list[Tensor]:
    """Outputs [S, d] of the model's layers for one sequence."""
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    with torch.no_grad(), _use_eager_attention(model), record_layer_outputs(model) as outputs:
        model(input_ids=tokens, use_cache=False)
    return [torch.cat(each) for each in outputs]


@contextmanager
def record_layer_outputs(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Context that records the outputs [tokens, d] of each layer."""
    layers = decoder_layers(model)
    outputs: list[list[Tensor]] = [[] for _ in layers]

    def keep(i: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs[i].append(hidden.detach().flatten(0, -2))

    handles = [layer.register_forward_hook(lambda _m, _i, o, i=i: keep(i, o)) for i, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def find_first_difference(model: nn.Module, own: list[Tensor], other: list[Tensor]) -> str:
    """Returns name and class of the first layer whose outputs differ clearly; "" if none does."""
    names = {id(module): name for name, module in model.named_modules()}
    allowed = logprob_tolerance(model)
    for layer, a, b in zip(decoder_layers(model), own, other, strict=False):
        if a.shape != b.shape or not bool((a - b).abs().max() <= allowed * a.abs().max()):
            return f"{names[id(layer)]} ({type(layer).__name__})"
    return ""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of the model's longest stack."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max((stack for stack in stacks if _is_stack(stack)), key=len, default=()))


@contextmanager
def shrink_model(model: Any) -> Iterator[None]:
    """Context with narrow windows and chunks and, for a large model, only two layers of each kind.

    Nothing is copied. A model that does not run with fewer layers keeps all of them.
    """
    config = model.config.get_text_config()
    narrowed: list[tuple[Any, str, int]] = []
    for holder in (config, *model.modules()):
        for name in _WINDOWS:
            value = vars(holder).get(name)
            if isinstance(value, int) and value > SHORT_WINDOW:
                narrowed.append((holder, name, value))
                setattr(holder, name, SHORT_WINDOW)
    try:
        with _fewer_layers(model, config):
            yield
    finally:
        for holder, name, value in narrowed:
            setattr(holder, name, value)


@contextmanager
def _fewer_layers(model: Any, config: Any) -> Iterator[None]:
    stack = next((s for s in _stacks(model) if list(s) == decoder_layers(model)), None)
    kept = [] if stack is None else _chosen(stack, config)
    if stack is None or len(kept) == len(stack) or sum(p.numel() for p in model.parameters()) <= _SMALL:
        yield
        return
    layers, count = list(stack), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    modules = stack._modules.copy()

    def restore() -> None:
        stack._modules.clear()
        stack._modules.update(modules)
        config.num_hidden_layers = count
        if kinds is not None:
            config.layer_types = kinds

    stack._modules.clear()
    stack._modules.update({str(n): layers[i] for n, i in enumerate(kept)})
    if kinds is not None:
        config.layer_types = [kinds[i] for i in kept]
    config.num_hidden_layers = len(kept)
    try:
        with torch.no_grad():
            hf_logprobs(model, random_prompts(model, (4,)), 1)
    except Exception:  # some layers depend on others and raise anything
        restore()
        yield
        return
    try:
        yield
    finally:
        restore()


def _chosen(stack: nn.ModuleList, config: Any) -> list[int]:
    kinds = getattr(config, "layer_types", None) or [""] * len(stack)
    seen: dict[object, int] = {}
    kept = []
    for i, layer in enumerate(stack):
        flags = tuple(sorted((k, v) for m in layer.modules() for k, v in vars(m).items() if isinstance(v, bool)))
        windows = tuple(vars(m).get("sliding_window") for m in layer.modules())
        kind = (kinds[i] if i < len(kinds) else "", tuple(type(m) for m in layer.modules()), flags, windows)
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _KEPT:
            kept.append(i)
    return kept


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    return [module for module in model.modules() if isinstance(module, nn.ModuleList)]


def _is_stack(modules: nn.ModuleList) -> bool:
    """True if these are layers of a network, not the experts of one layer."""
    return any(hasattr(each, "layer_idx") for module in modules for each in module.modules()) or len(modules) == 0


@contextmanager
def _use_eager_attention(model: Any) -> Iterator[None]:
    """Context with transformers' eager attention in evaluation mode."""
    config, training = model.config, model.training
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    before = [(part, part._attn_implementation) for part in parts if part is not None]
    for part, _ in before:
        part._attn_implementation = "eager"
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for part, name in before:
            part._attn_implementation = name
