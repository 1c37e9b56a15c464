"""On a GPU: memory goes back to torch's allocator, and weights come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.toys import toy_model

from rollmill.offload import OffloadableTensors
from rollmill.offload.manager import PhasePeakMemory
from rollmill.offload.plan import StorageTier
from rollmill.offload.stores import OffloadStore, PinnedMemoryStore, TempFileStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_model_leaves_the_gpu_and_comes_back(tmp_path: Path, place: StorageTier) -> None:
    copies: dict[StorageTier, OffloadStore] = {"memory": PinnedMemoryStore(), "disk": TempFileStore(tmp_path, "policy")}
    model = toy_model("qwen3", hidden_size=256).cuda()
    ids = torch.tensor([[1, 2, 3]], device="cuda")
    before = model(input_ids=ids).logits
    resident = OffloadableTensors("policy", model.parameters, copies)
    held, size = torch.cuda.memory_allocated(), resident.bytes()
    for _ in range(3):
        assert resident.move(place) == size
        assert torch.cuda.memory_allocated() <= held - size
        assert resident.move("device") == size
        assert torch.equal(model(input_ids=ids).logits, before)
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())


def test_copies_wait_for_work_that_was_queued() -> None:
    weight = torch.zeros(4_000_000, device="cuda")
    resident = OffloadableTensors("policy", lambda: [weight], {"memory": PinnedMemoryStore()})
    for _ in range(50):
        weight += 1
    resident.move("memory")
    others = torch.full((4_000_000,), -1.0, device="cuda")  # takes the memory
    resident.move("device")
    assert bool((weight == 50).all())
    assert bool((others == -1).all())


def test_peaks_are_those_of_each_phase() -> None:
    peaks = PhasePeakMemory(torch.device("cuda"))
    peaks.begin("rollout")
    large = torch.empty(100_000_000, dtype=torch.uint8, device="cuda")
    del large
    peaks.begin("train")
    found = peaks.take()
    assert found["rollout"] >= found["train"] + 90_000_000
