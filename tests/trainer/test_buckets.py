"""Whatever the sizes, every tensor is seen once, in few operations."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.trainer.distributed import tensor_parallel as buckets
from rollmill.trainer.distributed.tensor_parallel import apply_in_buckets


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 5), max_size=2), max_size=9), st.integers(4, 200))
def test_all_tensors_are_changed_in_place(shapes: list[list[int]], limit: int) -> None:
    tensors = [torch.full(shape, float(n)) for n, shape in enumerate(shapes)]
    sizes: list[int] = []

    def double(flat: Tensor) -> None:
        sizes.append(flat.nbytes)
        flat.mul_(2)

    with mock.patch.object(buckets, "ALLREDUCE_BUCKET_BYTES", limit):
        apply_in_buckets(tensors, double)
    assert all(bool((tensor == 2 * n).all()) for n, tensor in enumerate(tensors))
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    assert all(size <= max([limit, *(tensor.nbytes for tensor in tensors)]) for size in sizes)
