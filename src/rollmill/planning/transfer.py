"""What it takes to send new weights to explorers of this host."""

from __future__ import annotations

import statistics
import time
import uuid

import torch

from rollmill.models.load import PolicyModel
from rollmill.remote.explorer_worker import trainable_parameters
from rollmill.weights import SharedMemoryReceiver, SharedMemorySender, shared_memory_folder


def measure_weight_transfer(policy: PolicyModel, precision: str) -> tuple[float, float]:
    """Seconds to send all trained weights through shared memory, and to receive them; medians of three."""
    weights = trainable_parameters(policy)
    copies = {name: torch.empty_like(each, device="cpu") for name, each in weights.items()}
    place = shared_memory_folder() / f"rollmill-plan-{uuid.uuid4().hex}"
    sender = SharedMemorySender(place, weights, dtype=torch.bfloat16 if precision == "bf16" else None)
    receiver, times = SharedMemoryReceiver(place), []
    try:
        for version in range(4):
            began = time.perf_counter()
            sender.send(version, weights)
            sent = time.perf_counter()
            receiver.receive(copies)
            times.append((sent - began, time.perf_counter() - sent))
    finally:
        receiver.close()
        sender.close()
    return statistics.median(each for each, _ in times[1:]), statistics.median(each for _, each in times[1:])
