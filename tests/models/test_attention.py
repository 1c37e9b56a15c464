"""The GPU's kernel for packed rows is used where it can run, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rollmill.models.attention import varlen_available


@pytest.mark.parametrize(
    ("query", "value", "dtype", "capability", "available"),
    [
        (64, 64, torch.bfloat16, (9, 0), True),
        (256, 256, torch.float16, (8, 0), True),
        (192, 128, torch.bfloat16, (9, 0), False),  # DeepSeek's latent attention
        (512, 512, torch.bfloat16, (9, 0), False),  # Gemma 4's global layers
        (20, 20, torch.bfloat16, (9, 0), False),
        (64, 64, torch.float32, (9, 0), False),
        (64, 64, torch.bfloat16, (7, 5), False),
    ],
)
def test_the_kernel_is_used_for_heads_types_and_gpus_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    query: int,
    value: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    available: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with FakeTensorMode():
        queries = torch.empty(3, 4, query, dtype=dtype, device="cuda")
        values = torch.empty(3, 4, value, dtype=dtype, device="cuda")
        assert varlen_available(queries, values) is available
    assert not varlen_available(torch.empty(3, 4, value, dtype=dtype), torch.empty(3, 4, value, dtype=dtype))
