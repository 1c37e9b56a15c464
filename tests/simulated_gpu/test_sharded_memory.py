"""No rank holds more than its share of a sharded model and one bucket: bytes counted on each of two devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import metrics, tiny_run

import rollmill
from rollmill.errors import is_out_of_memory
from rollmill.trainer.trainer import Trainer
from rollmill.weights import buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("simulated"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MODEL = {"hidden_size": 64, "layers": 24, "heads": 2, "kv_heads": 1, "intermediate_size": 192}
LARGEST = 3 * 64 * 192 + 64 * (64 + 2 * 32 + 64)
"""Parameters of a layer, without its norms."""
PLUGIN = """
from pathlib import Path

import torch

from rollmill.trainer.trainer import Trainer
from rollmill.weights import buckets

buckets.BUCKET_BYTES = {bucket}
torch.ops.simulated_cuda.set_total({total})
made, step = Trainer.__init__, Trainer.step

def counts_its_start(self, *arguments, **more):
    made(self, *arguments, **more)
    note(self, "start")

def counts_its_step(self, *arguments, **more):
    found = step(self, *arguments, **more)
    note(self, "step")
    return found

def note(trainer, when):
    path = Path({folder!r}, f"{{trainer._ranks.rank}} {{when}}")
    path.write_text(str(torch.cuda.max_memory_allocated(torch.cuda.current_device())))

Trainer.__init__, Trainer.step = counts_its_start, counts_its_step
"""
BUCKET = 200_000
SFT: dict[str, Any] = {
    "stages": None,
    "model": {"new": MODEL},
    "algorithm": {"name": "sft", "batch": 4},
    "rewards": None,
    "rollout": None,
    "evaluation": None,
    "steps": 3,
    "checkpoint": {"every": 2},
    "trainer": {"precision": "bf16", "lr": 1e-3, "micro_batch_tokens": 16, "gradient_checkpointing": True},
}
GRPO = SFT | {
    "algorithm": {"name": "grpo"},
    "rewards": [{"name": "format", "pattern": "(?s).*[!-Oa-m]"}],
    "rollout": {"batch": 2, "group_size": 2, "max_new_tokens": 4},
    "engine": {"name": "native", "cache_gb": 0.004},
}
CACHE = 6 * 256 * 24 * 2 * 32 * 2
"""Bytes of the pages within that limit, and of the one that belongs to nobody."""


@contextmanager
def restored() -> Iterator[None]:
    """Afterwards this process is as it was before it imported the plugin."""
    size, before = buckets.BUCKET_BYTES, (Trainer.__init__, Trainer.step)
    torch.cuda.reset_peak_memory_stats(0)
    try:
        yield
    finally:
        buckets.BUCKET_BYTES = size
        Trainer.__init__, Trainer.step = before  # type: ignore[method-assign]
        torch.ops.simulated_cuda.set_total(torch.cuda.get_device_properties(0).total_memory)


def peaks(folder: Path, run: dict[str, Any], ranks: int, total: int = 0) -> tuple[dict[str, int], int]:
    """Greatest bytes of each rank's device after its start and after its steps, and bytes of the weights in fp32."""
    folder.mkdir()
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    total = total and before + total
    (folder / "counts.py").write_text(PLUGIN.format(bucket=BUCKET, total=total, folder=str(folder)))
    trainer = run["trainer"] | ({"ranks": ranks, "sharding": "fsdp"} if ranks > 1 else {})
    path = tiny_run(folder, **run | {"trainer": trainer, "plugins": [str(folder / "counts.py")]})
    with restored():
        rollmill.run(path, out=folder / "out")
    assert [each["step"] for each in metrics(folder / "out") if "grad_norm" in each] == [1, 2, 3]
    found = {f"{rank} {when}": folder / f"{rank} {when}" for rank in range(ranks) for when in ("start", "step")}
    [last] = (folder / "out/checkpoints").glob("step-000003")
    counted = {name: int(file.read_text()) - (before if name[0] == "0" else 0) for name, file in found.items()}
    return counted, (last / "model.safetensors").stat().st_size


def test_a_model_too_large_for_one_device_is_trained_on_two(tmp_path: Path) -> None:
    held, whole = peaks(tmp_path / "two", SFT, ranks=2)
    layer, activations = 4 * LARGEST, 400_000
    for rank in range(2):
        assert held[f"{rank} start"] < whole / 2 + 2 * layer + BUCKET
        # half of weights, gradients, two moments and a temporary of the optimizer's step; and what FSDP gathers and
        # reduces of a layer and the next one
        assert 2 * whole < held[f"{rank} step"] < 2.5 * whole + 6 * layer + BUCKET + activations
    fits = max(held.values()) + 100_000
    assert fits < 4 * whole
    with pytest.raises(RuntimeError) as error:
        peaks(tmp_path / "one", SFT, ranks=1, total=fits)
    assert is_out_of_memory(error.value)
    peaks(tmp_path / "again", SFT, ranks=2, total=fits)


def test_the_engine_beside_a_rank_adds_a_copy_in_its_own_type(tmp_path: Path) -> None:
    held, whole = peaks(tmp_path / "run", GRPO, ranks=2)
    assert abs(held["0 step"] - held["1 step"] - whole / 2 - CACHE) < 200_000
