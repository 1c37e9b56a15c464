"""Arrays packed into one transfer arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmill.models.transfers import to_device, to_host

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
ARRAYS = [
    np.arange(5, dtype=np.int64)[None] - 2,
    np.zeros((0, 3), np.float32),
    np.array([[1.5, -np.inf], [np.nan, 1e-40]], np.float32).T,  # not contiguous
    np.array([True, False, True]),
    np.array([2**-53, 1 / 3]),
    np.arange(7, dtype=np.uint8),
    np.array(3, np.int16),
]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_arrays_arrive_as_they_were(device: str) -> None:
    there = to_device(ARRAYS, torch.device(device))
    assert [each.device.type for each in there] == [device] * len(ARRAYS)
    for array, tensor in zip(ARRAYS, to_host(there), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert to_host([]) == to_device([], torch.device(device)) == []
