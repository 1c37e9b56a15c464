"""A simulated CUDA device for builds of torch without CUDA, so that machines without a GPU run the CUDA path.

Tensors of device "cuda" are real tensors whose memory lies on the host. `device.cpp` computes every operation with the
CPU's kernel, after the checks that CUDA makes: operands on one device, generators of the device, types that its kernels
have. Fresh memory is NaN. `torch.cuda` captures and replays graphs as a GPU does (`graphs.py`), some kernels have the
limits of the real ones (`kernels.py`), NCCL is gloo on the same memory (`nccl.py`), and `Trace` (`trace.py`) counts
kernels, and what makes the host wait. Copies for which it does not wait end at its next wait, not before.

It cannot show races between kernels, CUDA's rounding, hangs of NCCL, fragmentation, or what bitsandbytes, Triton and
vLLM do on a GPU.

The environment switches it on, in this process and in those that it starts: SIMULATED_CUDA=1, and the folder `site` on
PYTHONPATH (`make test-simulated-gpu`). SIMULATED_CUDA_DEVICES is the number of devices, SIMULATED_CUDA_GB the memory of
each; CUDA_VISIBLE_DEVICES works as for CUDA.
"""

from __future__ import annotations

import importlib

_installed = False


def install() -> None:
    """Build what is missing, and put the simulation in the place of torch.cuda. Once per process, before CUDA is used.

    Raises RuntimeError where `build.missing` gives a reason.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import torch

    from support.simulated_cuda import build

    torch.ops.load_library(str(build.device_library()))
    # these register their kernels, or replace functions of torch, when they are imported
    for name in ("cuda_api", "kernels", "graphs", "nccl"):
        importlib.import_module(f"support.simulated_cuda.{name}")
