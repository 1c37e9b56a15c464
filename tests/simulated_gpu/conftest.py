"""Tests of whole runs on a CUDA device: the simulated one (`make test-simulated-gpu`), or a real one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    """Skips where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, neither a real one nor the simulated one (`make test-simulated-gpu`)")


@pytest.fixture(scope="session")
def simulated(cuda: None) -> None:
    """Skips on a real device, which counts nothing."""
    if os.environ.get("SIMULATED_CUDA") != "1":
        pytest.skip("counts kernels and waits, which needs the simulated device")
