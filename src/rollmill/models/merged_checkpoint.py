"""Writes a model whose adapters are merged as a checkpoint folder, one tensor after the other.

A merged copy would take as much memory as the adapted weights, which a run with adapters is there to save.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rollmill.errors import ModelError
from rollmill.models.lora import (
    BASE_FOLDER,
    adapted_layers,
    adapter_product,
    copy_without_adapters,
    merged_model,
    merged_weight,
)
from rollmill.models.storage import page_out

_WEIGHTS = "model.safetensors"
_PART = 1 << 26  # bytes that are written at a time
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_NAMES |= {torch.bool: "BOOL"}


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@torch.no_grad()
def save_merged(model: Any, directory: Path) -> None:
    """Writes weights in their own type, with adapters merged, and the model's configuration.

    Adapters of a quantised model are merged into the weights of its folder, as they were before.

    Raises:
        ModelError: that folder's files cannot be read.
        OSError: (or safetensors' own error) the directory cannot be written.
    """
    conversions: Any = getattr(model, "_weight_conversions", None)
    if conversions is None or conversions:  # transformers stores such a model in another layout than it computes with
        whole: Any = merged_model(model)
        whole.save_pretrained(directory)
        return
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(model).items()}
    plain: Any = copy_without_adapters(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    parameters = dict(plain.named_parameters())
    stored = plain.state_dict().keys()
    buffers = {name: each for name, each in plain.named_buffers() if name in stored}
    plain.save_pretrained(directory, state_dict={"none": torch.zeros(1)})  # all files but the weights
    if (base := getattr(model, BASE_FOLDER, None)) is None:
        tensors = [_lazy(name, each, layers.get(name)) for name, each in {**parameters, **buffers}.items()]
    else:
        tensors = [_with_delta(each, layers.get(each.name)) for each in stored_tensors(base)]
    write_safetensors(directory / _WEIGHTS, tensors)


def _with_delta(tensor: LazyTensor, layer: nn.Module | None) -> LazyTensor:
    if layer is None:
        return tensor

    def make() -> Tensor:
        base = tensor.make()
        merged = base.float() + adapter_product(layer)
        page_out(base.untyped_storage())
        return merged

    return tensor._replace(make=make)


def stored_tensors(folder: Path) -> list[LazyTensor]:
    """Returns the tensors of a folder's *.safetensors, which are read when they are made.

    Raises:
        ModelError: a file cannot be read.
    """
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            opened: Any = safe_open(file, "pt")
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                part = opened.get_slice(name)
                dtype = next(dtype for dtype, text in _NAMES.items() if text == part.get_dtype())
                found.append(LazyTensor(name, tuple(part.get_shape()), dtype, partial(opened.get_tensor, name)))
        except Exception as error:  # safetensors raises errors of its own
            raise ModelError(f"model.path: {file} cannot be read: {error}") from error
    return found


def _lazy(name: str, tensor: Tensor, layer: nn.Module | None) -> LazyTensor:
    def make() -> Tensor:
        return tensor if layer is None else merged_weight(layer)

    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, make)


def write_safetensors(path: Path, tensors: Iterable[LazyTensor]) -> None:
    """Writes a file in the safetensors format (8 bytes with the length of a JSON header, the header, the data).

    Raises:
        OSError: the file cannot be written.
    """
    ordered = sorted(tensors, key=lambda each: (-each.dtype.itemsize, each.name))  # aligned, as the library does
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        start, end = end, end + each.dtype.itemsize * torch.Size(each.shape).numel()
        header[each.name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in ordered:
            made = each.make().detach().to("cpu", each.dtype).contiguous()
            assert tuple(made.shape) == each.shape
            for part in made.view(-1).view(torch.uint8).split(_PART):
                file.write(part.numpy().data)
                page_out(made.untyped_storage())
            del made, part  # before the next one is made
