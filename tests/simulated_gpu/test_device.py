"""The simulated device refuses what CUDA refuses, and shows what a program must not rely on."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("simulated")]


def test_operands_are_on_one_device() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_fresh_memory_is_not_zero() -> None:
    assert bool(torch.empty(3, device="cuda").isnan().all())


def test_a_capture_refuses_what_waits_for_the_host() -> None:
    values = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        values.sum().item()


def test_pinned_memory_is_read_at_some_time_before_the_host_waits() -> None:
    pinned = torch.zeros(3, pin_memory=True)
    there = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.fill_(1.0)
    assert there.tolist() == [0.0] * 3
    pinned.to("cuda", non_blocking=True)
    pinned.fill_(2.0)
    with pytest.raises(RuntimeError, match="overwritten"):
        torch.cuda.synchronize()


def test_a_copy_to_the_host_is_there_when_the_host_has_waited() -> None:
    here = torch.zeros(3, pin_memory=True)
    here.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert bool(here.isnan().all())
    torch.cuda.synchronize()
    assert here.tolist() == [1.0] * 3
