"""The weights of a checkpoint as pieces of a model's parameters, where those have other names or shapes: many
vision-language models have other names in memory, and mixtures of experts all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import ModelError

_SMALL = (12, 20, 28, 4, 4)  # sizes that stand for those of a weight, and can be cut in halves and quarters


class StoredPart(NamedTuple):
    """A weight of a checkpoint as a piece of a parameter. JSON turns it into a list, which `take_part` takes, too."""

    name: str  #: in the checkpoint
    ranges: list[tuple[int, int]]  #: for each dimension of the parameter
    dropped: int  #: leading dimensions, of size 1, that it has not
    transposed: bool  #: its last two dimensions are exchanged


def stored_parts(model: Any) -> dict[str, list[StoredPart]]:
    """Find the parts of those parameters of a transformers model that a checkpoint stores in another way, by name.

    The model's own conversion is applied to small tensors of numbers, which then show where each one came from.

    Raises ModelError: several parameters are one weight there.
    """
    from transformers.core_model_loading import revert_weight_conversion  # vLLM's environment may have another version

    shapes = {name.replace(".base_layer.", "."): each.shape for name, each in model.named_parameters()}
    shapes = {name: shape for name, shape in shapes.items() if ".lora_" not in name}
    names, numbered, starts, small = list(shapes), {}, [0], []
    for name in names:
        shape = shapes[name]
        experts = shape[:1] if len(shape) == 3 else ()
        small.append((*experts, *_SMALL[: len(shape) - len(experts)]))
        count = int(np.prod(small[-1]))
        numbered[name] = torch.arange(starts[-1], starts[-1] + count).reshape(small[-1])
        starts.append(starts[-1] + count)
    found: dict[str, list[StoredPart]] = {}
    for stored, numbers in revert_weight_conversion(model, dict(numbered)).items():
        at = int(np.searchsorted(starts, int(numbers.flatten()[0]), side="right")) - 1
        name = names[at]
        if stored != name or numbers.shape != small[at]:
            found.setdefault(name, []).append(
                _part(stored, numbers.numpy() - starts[at], small[at], tuple(shapes[name]))
            )
    return found


def _part(name: str, numbers: np.ndarray[Any, Any], small: tuple[int, ...], real: tuple[int, ...]) -> StoredPart:
    if numbers.min() < 0 or numbers.max() >= np.prod(small):
        raise ModelError(f"{name} is made of several parameters of the model, which cannot be told apart")
    ranges = [(int(each.min()), int(each.max()) + 1) for each in np.unravel_index(numbers, small)]
    dropped = len(small) - numbers.ndim
    scaled = [(low * size // of, high * size // of) for (low, high), size, of in zip(ranges, real, small, strict=True)]
    whole = torch.arange(int(np.prod(small))).reshape(small)
    for transposed in (False, True):
        part = StoredPart(name, ranges, dropped, transposed)
        if np.array_equal(take_part(whole, part).numpy(), numbers):
            return part._replace(ranges=scaled)
    raise ModelError(f"{name} is no piece of a parameter of the model")


def take_part(weight: Tensor, part: StoredPart | list[Any]) -> Tensor:
    """Return a view of a parameter: the weight of the checkpoint."""
    _, ranges, dropped, transposed = part
    piece = weight[tuple(slice(low, high) for low, high in ranges)]
    piece = piece.reshape(piece.shape[dropped:])
    return piece.mT if transposed else piece
