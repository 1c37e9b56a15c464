"""What is packed is what was given, and its checksum is the block's, whoever computes which part of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmill.weights import layout as module
from rollmill.weights.buckets import pack_block
from rollmill.weights.layout import CRC32, XXH3, BlockLayout, compute_checksum

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=5)


@given(SIZES, st.sampled_from([None, torch.bfloat16]), st.sampled_from([XXH3, CRC32]), st.data())
def test_a_block_weighs_what_was_packed(
    sizes: list[int], dtype: torch.dtype | None, kind: str, data: st.DataObject
) -> None:
    source = torch.Generator().manual_seed(sum(sizes))
    tensors = {f"t{n}": torch.randn(size, generator=source) for n, size in enumerate(sizes)}
    tensors["turned"] = torch.randn(7, 3, generator=source).T
    layout = BlockLayout.of(tensors, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", 4096)
        patch.setattr(module, "PIECE_BYTES", 512)
        block = torch.full((layout.size,), 255, dtype=torch.uint8)
        found = pack_block(tensors, layout, block, kind)
        for name, view in layout.tensors(block).items():
            assert torch.equal(view, tensors[name].to(view.dtype))
        patch.setattr(module, "THREADS", 1)
        assert compute_checksum(layout, block, kind) == found
        place = layout.places[data.draw(st.sampled_from([n for n, p in layout.places.items() if p.bytes]))]
        block[place.start + data.draw(st.integers(0, place.bytes - 1))] ^= 1
        assert compute_checksum(layout, block, kind) != found


def test_parts_that_change_places_weigh_otherwise() -> None:
    tensors = {"a": torch.zeros(10), "b": torch.ones(10)}
    layout = BlockLayout.of(tensors)
    one, other = (torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2))
    assert pack_block(tensors, layout, one) != pack_block({"a": tensors["b"], "b": tensors["a"]}, layout, other)
