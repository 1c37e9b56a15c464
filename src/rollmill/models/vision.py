"""Pictures in a policy's prompts: features of the vision tower, embeddings and positions.

A vision-language model is its language part, which runs as any text model does, on embeddings in which the rows of
picture tokens are replaced by features of the vision tower. Processor, tower, projector and positions are the model's
own; this module only puts their results into flat rows.

Shapes: T tokens of a row, P tokens of a prompt, n picture tokens of a prompt, d hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollmill.data.picture_prompts import PictureProcessor, PicturePrompt
from rollmill.errors import ModelError

_TOWERS = ("visual", "vision_tower", "vision_model")
_PROJECTORS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
_CACHED_FEATURES = 64  # prompts


def picture_processor(owner: Any) -> PictureProcessor | None:
    """The processor of a policy's model or tokenizer; None for text models."""
    found: PictureProcessor | None = getattr(owner, "picture_processor", None)
    return found


def text_model(model: Any) -> Any:
    """The language part of a vision-language model, without output layer; a text model itself."""
    if picture_processor(model) is None:
        return model
    base = model.model
    return base.language_model if hasattr(base, "language_model") else base.text_model


def final_softcap(model: Any) -> float | None:
    """Cap of a causal language model's logits, softcap * tanh(logits / softcap); None: the model has none."""
    config = model.config
    if config.model_type == "paligemma":  # other vision-language models do not apply that of their language part
        config = config.get_text_config()
    found: float | None = getattr(config, "final_logit_softcapping", None)
    return found


def vision_parts(model: Any) -> dict[str, str]:
    """Names of the modules that are a vision-language model's tower (`vision`) or its `projector`; empty for others."""
    if picture_processor(model) is None:
        return {}
    parts = dict.fromkeys(_TOWERS, "vision") | dict.fromkeys(_PROJECTORS, "projector")
    return {f"model.{name}": parts[name] for name, _ in model.model.named_modules() if name in parts}


def freeze_parts(model: Any, frozen: Sequence[str]) -> None:
    """Freeze the parts `vision` and `projector` of a vision-language model, and unfreeze those not named.

    With adapters, which are in the language part, nothing else is trained.
    """
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    for name, own in vision_parts(model).items():  # a projector inside the tower comes after it
        model.get_submodule(name).requires_grad_(own not in frozen and not adapted)
    if (newline := getattr(model.model, "image_newline", None)) is not None:  # ends a line of a picture (LLaVA-NeXT)
        newline.requires_grad_("projector" not in frozen and not adapted)


@dataclass(frozen=True, eq=False)
class PictureFeatures:
    """Results of tower and projector for a prompt."""

    rows: Tensor  #: [n, d]
    deep: tuple[Tensor, ...] = ()  #: [n, d] each, added to the hidden states of the first layers (Qwen3-VL)


def batch_pictures(prompts: Iterable[PicturePrompt]) -> list[list[PicturePrompt]]:
    """The parts of prompts in batches, one for each pass of the tower: those whose inputs have equal shapes."""
    batches: dict[object, list[PicturePrompt]] = {}
    parts = {part.key: part for prompt in prompts for _, part in prompt.parts}
    for part in parts.values():
        shape = tuple((name, tuple(value.shape[1:])) for name, value in part.inputs.items())
        batches.setdefault(shape, []).append(part)
    return list(batches.values())


def compute_features(model: Any, prompts: Iterable[PicturePrompt], passes: int = 0) -> dict[str, PictureFeatures]:
    """Run the vision tower on the pictures of prompts, once for all parts whose inputs have equal shapes.

    Args:
        passes: number of passes to make, at least as many as the pictures need. Ranks that share the tower's weights
            communicate in each, so all make equally many; those left over see a picture of noise.

    Returns features by key of the part, and those of the noise. Raises ModelError if the numbers of features and of
    picture tokens differ.
    """
    found: dict[str, PictureFeatures] = {}
    batches = batch_pictures(prompts)
    for batch in batches:
        found |= _features(model, batch)
    for spare in range(passes - len(batches)):
        processor = picture_processor(model)
        assert processor is not None
        [noise] = _features(model, [processor.noise_prompt([(28, 40)], 1)]).values()
        found[f"spare pass {spare}"] = noise
    return found


def _features(model: Any, prompts: list[PicturePrompt]) -> dict[str, PictureFeatures]:
    tower = next(each for each in model.model.parameters())
    inputs = {}
    for name in prompts[0].inputs:
        value = torch.cat([each.inputs[name] for each in prompts])
        inputs[name] = value.to(tower.device, tower.dtype if value.is_floating_point() else value.dtype)
    output = model.model.get_image_features(**inputs, return_dict=True)
    rows = _flat(output.pooler_output)
    counts = [int(each.token_types.sum()) for each in prompts]
    if len(rows) != sum(counts):
        raise ModelError(
            f"{type(model).__name__} makes {len(rows)} features of a prompt's pictures, but its processor wrote "
            f"{sum(counts)} picture tokens; config.json and the processor's files do not belong together"
        )
    deep = [_flat(each).split(counts) for each in getattr(output, "deepstack_features", None) or ()]
    return {
        prompt.key: PictureFeatures(own, tuple(each[i] for each in deep))
        for i, (prompt, own) in enumerate(zip(prompts, rows.split(counts), strict=True))
    }


class FeatureCache:
    """Features of the prompts that an engine prefills, once per prompt and version of the weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: OrderedDict[str, PictureFeatures] = OrderedDict()
        self.computed = 0  #: passes of the tower so far

    def __call__(self, prompt: PicturePrompt) -> PictureFeatures:
        """Features of a prompt of one part."""
        if prompt.key not in self._found:
            self._found |= compute_features(self._model, [prompt])
            self.computed += 1
        self._found.move_to_end(prompt.key)
        while len(self._found) > _CACHED_FEATURES:
            self._found.popitem(last=False)
        return self._found[prompt.key]

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._found.clear()


def compute_positions(model: Any, prompt: PicturePrompt) -> tuple[Tensor, int] | None:
    """Positions [3, P] of a prompt's tokens, and the offset from index to position behind it; None: 0, 1, 2, ..."""
    if not hasattr(model.model, "get_rope_index"):
        if prompt.both_ways != "prompt":
            return None
        return torch.arange(1, len(prompt.token_ids) + 1).expand(3, -1), 1  # PaliGemma counts from 1
    positions, offsets = model.model.get_rope_index(
        torch.tensor([prompt.token_ids]),
        mm_token_type_ids=prompt.token_types,
        image_grid_thw=torch.cat([part.inputs["image_grid_thw"] for _, part in prompt.parts]),
    )
    return positions[:, 0], int(offsets[0, 0])


@dataclass(frozen=True, eq=False)
class PictureSpan:
    """Tokens of a row that belong to a sequence with pictures."""

    prompt: PicturePrompt  #: the sequence up to its last picture
    start: int  #: of the tokens in the row
    first: int  #: index of the first one in its sequence
    length: int

    def parts(self) -> list[tuple[int, PicturePrompt]]:
        """Parts of the prompt that have tokens in the row, with their index in the sequence."""
        last = self.first + self.length
        return [(at, part) for at, part in self.prompt.parts if at < last and at + len(part.token_ids) > self.first]


def build_picture_inputs(
    model: Any,
    inputs: dict[str, Any],
    spans: Sequence[PictureSpan],
    features: Mapping[str, PictureFeatures],
) -> dict[str, Any]:
    """Replace the embeddings and positions of picture tokens in the arguments of a forward pass of the language part.

    Args:
        inputs: from `build_forward_inputs`, with `input_ids` [1, T] and `position_ids` [1, T].
        spans: of the sequences with pictures; the row's other sequences are text.
        features: by key of the prompts' parts; parts whose picture tokens are not in the row may be missing. Those
            that no token shows are in the graph all the same, with weight 0: ranks that share the tower's weights
            communicate in its backward pass, too.
    """
    tokens, positions = inputs.pop("input_ids"), inputs["position_ids"]
    positions_3T = positions.expand(3, -1).clone()
    rows: list[int] = []
    found: list[tuple[str, int]] = []  # key of the part and number of the feature
    for span in spans:
        own = compute_positions(model, span.prompt)
        inside = min(span.first + span.length, len(span.prompt.token_ids))
        here = max(inside - span.first, 0)
        if own is not None:
            positions_3T[:, span.start : span.start + here] = own[0][:, span.first : inside].to(positions.device)
            positions_3T[:, span.start + here : span.start + span.length] += own[1]
        for begin, part in span.parts():
            for number, index in enumerate(part.token_types[0].nonzero()[:, 0].tolist()):
                if span.first <= begin + index < span.first + span.length:
                    rows.append(span.start + begin + index - span.first)
                    found.append((part.key, number))
    inputs["position_ids"] = positions_3T[:, None] if hasattr(model.model, "get_rope_index") else positions_3T[:1]
    embeds = model.get_input_embeddings()(tokens)
    if rows:
        order = sorted(range(len(rows)), key=lambda i: rows[i])
        at = torch.tensor([rows[i] for i in order], device=tokens.device)

        def gather(pick: Any) -> Tensor:
            return torch.cat([pick(features[key])[a:b] for key, a, b in _runs([found[i] for i in order])])

        embeds = embeds.index_copy(1, at, gather(lambda f: f.rows).to(embeds.dtype)[None])
        depth = len(features[found[0][0]].deep)
        if depth:
            mask = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
            mask[0, at] = True
            inputs["visual_pos_masks"] = mask
            inputs["deepstack_visual_embeds"] = [gather(lambda f, i=i: f.deep[i]) for i in range(depth)]
    shown = {key for key, _ in found}
    for each in (features[key] for key in features if key not in shown):
        for unseen in (each.rows, *each.deep):
            embeds = embeds + unseen[:0].sum().to(embeds.dtype)
    inputs["inputs_embeds"] = embeds
    return inputs


def _runs(found: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Joins neighbouring features of a prompt into slices (key, first, last + 1)."""
    runs: list[tuple[str, int, int]] = []
    for key, number in found:
        if runs and runs[-1][0] == key and runs[-1][2] == number:
            runs[-1] = key, runs[-1][1], number + 1
        else:
            runs.append((key, number, number + 1))
    return runs


def _flat(features: Any) -> Tensor:
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
