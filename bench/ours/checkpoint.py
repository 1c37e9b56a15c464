"""Worker: writes a checkpoint, and loads it with and without verification, in turn."""

from __future__ import annotations

import argparse
import gc
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models import model_dir
from bench.worker import Channel, serve, versions
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.manifest import THREADS, find_damage, verifying
from rollmill.orchestrator.state import RunState

STEP = 1
MACHINE = {"threads": 2, "precision": "fp32", "run_id": "bench"}


def load(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer, the model in fp32 as a policy is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def write(checkpoints: Checkpoints, name: str, dtype: torch.dtype) -> float:
    """Write a checkpoint; returns the seconds."""
    model, tokenizer = load(model_dir(name))
    model.to(dtype)
    moments = {n: [torch.randn(p.shape), torch.rand(p.shape)] for n, p in model.named_parameters()}
    began = time.perf_counter()
    checkpoints.write(STEP, model, tokenizer, RunState(step=STEP).to_json(), {"adam": moments}, MACHINE)
    return time.perf_counter() - began


def load_all(checkpoints: Checkpoints, *, verified: bool) -> float:
    """Load state, optimizer and policy as a resumed run does, with or without verification; returns the seconds."""
    began = time.perf_counter()
    with verifying(checkpoints.path(STEP)) if verified else nullcontext():
        start = checkpoints.read(STEP)
        model = load(checkpoints.path(STEP))
    seconds = time.perf_counter() - began
    del start, model
    gc.collect()
    return seconds


def hash_rates(files: list[Path]) -> dict[str, float]:
    """GB per second of hashes, each in one and two threads."""

    def hashed(kind: Callable[[], Any], path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            hashlib.file_digest(file, kind)

    size = sum(path.stat().st_size for path in files) / 1e9
    found = {}
    for name, kind in (("sha256", hashlib.sha256), ("blake2b", hashlib.blake2b)):
        for threads in (1, THREADS):
            began = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(hashed, [kind] * len(files), files))
            found[f"{name}, {threads} threads"] = round(size / (time.perf_counter() - began), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    args = parser.parse_args()
    channel = Channel()
    torch.set_num_threads(2)
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        checkpoints = Checkpoints(folder)
        write_seconds = write(checkpoints, args.model, getattr(torch, args.dtype))
        gc.collect()
        files = sorted(path for path in checkpoints.path(STEP).rglob("*") if path.is_file())
        began = time.perf_counter()
        assert find_damage(checkpoints.path(STEP)) == []
        hash_seconds = time.perf_counter() - began
        serve(
            channel,
            lambda: {
                "unverified": load_all(checkpoints, verified=False),
                "verified": load_all(checkpoints, verified=True),
            },
            versions=versions("torch", "transformers", "safetensors"),
            gigabytes=round(sum(path.stat().st_size for path in files) / 1e9, 3),
            write_seconds=round(write_seconds, 3),
            hash_seconds=round(hash_seconds, 3),
            hash_gb_per_s=hash_rates([path for path in files if path.suffix in (".safetensors", ".pt")]),
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
