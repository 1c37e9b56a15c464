"""Writes a model as a checkpoint folder, one tensor after the other: with merged adapters, or gathered from ranks.

A merged copy would take as much memory as the adapted weights, which a run with adapters is there to save; a gathered
one as much as a model that no rank can hold.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rollmill.errors import ModelError
from rollmill.models.gguf import find_gguf
from rollmill.models.lora import (
    BASE_FOLDER,
    adapted_layers,
    adapter_product,
    copy_without_adapters,
    merged_model,
    merged_weight,
)
from rollmill.models.storage import page_out

if TYPE_CHECKING:
    from rollmill.weights.buckets import ShardedWeights

_WEIGHTS = "model.safetensors"
FILE_BYTES = 5 << 30
"""Bytes of a file of gathered weights at most, unless a single tensor is larger."""
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

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@torch.no_grad()
def save_merged(model: Any, directory: Path) -> None:
    """Writes weights in their own type, with adapters merged, and the model's configuration.

    Adapters of a quantised model are merged into the weights of its folder, as they were before.

    Raises:
        ModelError: that folder's files cannot be read.
        OSError: (or safetensors' own error) the directory cannot be written.
    """
    if not stored_as_computed(model):
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


def stored_as_computed(model: Any) -> bool:
    """True if transformers stores a loaded model in the layout that it computes with."""
    return getattr(model, "_weight_conversions", None) == []


@torch.no_grad()
def save_gathered(model: Any, weights: ShardedWeights, directory: Path) -> None:
    """Writes weights that ranks hold parts of as transformers would write the whole model, which never is in memory.

    Files have at most `FILE_BYTES`; with several, an index says which tensor is in which.

    Args:
        model: without weights; its buffers and its configuration are written.

    Raises:
        OSError: (or safetensors' own error) the directory cannot be written.
    """
    stored, buffers = model.state_dict().keys(), dict(model.named_buffers())
    model.save_pretrained(directory, state_dict={"none": torch.zeros(1)})  # all files but the weights
    (directory / _WEIGHTS).unlink()
    kept = {name: each for name, each in buffers.items() if name in stored}
    found = itertools.chain(weights.gather(None), kept.items())

    def gathered(name: str) -> Tensor:
        pair: tuple[str, Tensor] = next(found)
        next_name, whole = pair
        assert next_name == name
        return whole

    files: list[list[LazyTensor]] = [[]]
    for name, each in {**weights, **kept}.items():
        lazy = LazyTensor(name, tuple(each.shape), each.dtype, partial(gathered, name))
        if files[-1] and sum(other.bytes for other in (*files[-1], lazy)) > FILE_BYTES:
            files.append([])
        files[-1].append(lazy)
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [_WEIGHTS]
    try:
        for file, tensors in zip(names, files, strict=True):
            write_safetensors(directory / file, tensors, in_order=True)
    finally:
        for _ in found:  # all ranks gather to the end
            pass
    if count > 1:
        places = {each.name: file for file, tensors in zip(names, files, strict=True) for each in tensors}
        total = sum(each.bytes for tensors in files for each in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


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


def stored_type(folder: Path, dtype: torch.dtype) -> torch.dtype | None:
    """Returns the one type of all tensors in a folder's *.safetensors, if `dtype` holds their values; else None."""
    if find_gguf(folder) is not None:
        return None
    kinds = {each.dtype for each in stored_tensors(folder)}
    return kinds.pop() if len(kinds) == 1 and kinds <= {dtype, torch.bfloat16, torch.float16} else None


def _lazy(name: str, tensor: Tensor, layer: nn.Module | None) -> LazyTensor:
    def make() -> Tensor:
        return tensor if layer is None else merged_weight(layer)

    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, make)


def write_safetensors(path: Path, tensors: Sequence[LazyTensor], *, in_order: bool = False) -> None:
    """Writes a file in the safetensors format (8 bytes with the length of a JSON header, the header, the data).

    Args:
        in_order: tensors have to be made in the order given, which is another one than that of the file.

    Raises:
        OSError: the file cannot be written.
    """
    ordered = sorted(tensors, key=lambda each: (-each.dtype.itemsize, each.name))  # aligned, as the library does
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        start, end = end, end + each.bytes
        header[each.name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in tensors if in_order else ordered:
            file.seek(8 + len(text) + header[each.name]["data_offsets"][0])
            made = each.make().detach().to("cpu", each.dtype).contiguous()
            assert tuple(made.shape) == each.shape
            for part in made.view(-1).view(torch.uint8).split(_PART):
                file.write(part.numpy().data)
                page_out(made.untyped_storage())
            del made, part  # before the next one is made
