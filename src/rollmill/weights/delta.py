"""What changed between two blocks of weights, in as few bytes as it takes.

After a small update most weights are the same once they are rounded to bf16. Elements that differ are found by their
bits, so that applying a delta gives exactly the block it was made from, NaNs and signed zeros included.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmill.weights.layout import BlockLayout

_MAX_DELTA_SHARE = 0.5
"""A tensor is sent whole where its delta would take more than this share of its bytes."""
INDEX_PREFIX, VALUE_PREFIX = "at.", "new."

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_delta(layout: BlockLayout, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The tensors to send: `new.NAME` has the bits that differ, `at.NAME` where (int32 or int64); none if none does."""
    found: dict[str, Tensor] = {}
    for name, place in layout.places.items():
        bits = _BITS[place.type.itemsize]
        part = slice(place.start, place.start + place.bytes)
        before, after = old[part].view(bits), new[part].view(bits)
        at = (before != after).nonzero().view(-1)
        wide = torch.int32 if len(after) < 2**31 else torch.int64
        if len(at) * (wide.itemsize + bits.itemsize) > _MAX_DELTA_SHARE * place.bytes:
            found[VALUE_PREFIX + name] = after.clone()
        elif len(at):
            found[INDEX_PREFIX + name], found[VALUE_PREFIX + name] = at.to(wide), after[at]
    return found


def apply_delta(layout: BlockLayout, block: Tensor, delta: Mapping[str, Tensor]) -> None:
    """Turn the old block into the new one."""
    for name, place in layout.places.items():
        if (values := delta.get(VALUE_PREFIX + name)) is None:
            continue
        target = block[place.start : place.start + place.bytes].view(_BITS[place.type.itemsize])
        if (at := delta.get(INDEX_PREFIX + name)) is None:
            target.copy_(values)
        else:
            target[at.long()] = values
