"""Worker: weight transfer from one process to another with each transport, and a memory copy of the same bytes."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.worker import Channel, serve, versions

LAYERS, STEP = 24, 1e-5
"""Number of tensors, and the largest relative change of a weight by an update."""


class Sends(Protocol):
    """Interface of a measured sender."""

    def send(self, version: int, weights: dict[str, Tensor]) -> None: ...


def made(megabytes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make weights of this size."""
    size = megabytes * 1_000_000 // LAYERS // dtype.itemsize
    source = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(size, generator=source).to(dtype) for n in range(LAYERS)}


class Pickled:
    """Baseline: weights pickled by torch into a file in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, version: int, weights: dict[str, Tensor]) -> None:
        """Write the weights atomically."""
        torch.save(weights, self._path / "writing")
        (self._path / "writing").rename(self._path / f"{version}.pt")


def sender(kind: str, path: Path, weights: dict[str, Tensor]) -> Sends:
    """Make the sender of a transport."""
    from rollmill.weights import BroadcastSender, FolderSender, SharedMemorySender

    match kind:
        case "shared":
            return SharedMemorySender(path / "weights", weights)
        case "folder" | "delta":
            return FolderSender(path, weights, whole_every=1 if kind == "folder" else 10**6)
        case "broadcast":
            made = BroadcastSender("127.0.0.1", "bench", weights)
            (path / "address").write_text(made.address)
            return made
    return Pickled(path)


def receive(kind: str, path: Path, weights: dict[str, Tensor], commands: Connection) -> None:
    """Run the receiving process, which confirms each version."""
    from rollmill.weights import BroadcastReceiver, FolderReceiver, SharedMemoryReceiver

    torch.set_num_threads(1)
    get: Callable[[int], Any]
    if kind == "shared":
        shared = SharedMemoryReceiver(path / "weights")
        get = lambda version: shared.newest() == version and shared.hold()  # noqa: E731
    elif kind in ("folder", "delta"):
        folder = FolderReceiver(path)
        get = lambda version: folder.newest() == version and folder.receive(weights)  # noqa: E731
    elif kind == "broadcast":
        others = BroadcastReceiver((path / "address").read_text())
        get = lambda version: others.newest() == version and others.receive(weights)  # noqa: E731
    else:
        get = lambda version: (path / f"{version}.pt").exists() and torch.load(path / f"{version}.pt")  # noqa: E731
    commands.send("ready")
    while (version := commands.recv()) is not None:
        while not get(version):
            time.sleep(0.0002)
        commands.send(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("shared", "folder", "delta", "broadcast", "pickled", "memory"))
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    channel = Channel()
    torch.set_num_threads(1)
    weights = made(args.megabytes, getattr(torch, args.dtype))
    size = sum(each.nbytes for each in weights.values())
    if args.kind == "memory":
        copies = {name: torch.zeros_like(each) for name, each in weights.items()}

        def copied() -> dict[str, Any]:
            began = time.perf_counter()
            for name, each in weights.items():
                copies[name].copy_(each)
            return {"gb_per_s": size / 1e9 / (time.perf_counter() - began)}

        return serve(channel, copied, versions=versions("torch"))
    folder = Path(tempfile.mkdtemp(prefix="bench-sync-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        ours, theirs = mp.Pipe()
        empty = {name: torch.zeros_like(each) for name, each in weights.items()}
        other = mp.get_context("spawn").Process(target=receive, args=(args.kind, folder, empty, theirs), daemon=True)
        sends = sender(args.kind, folder, weights)
        other.start()
        ours.recv()
        version = 0

        def sent() -> dict[str, Any]:
            nonlocal version
            version += 1
            for each in weights.values():
                each.mul_(1 + STEP * (-1) ** version)
                each[version::500] += 0.01  # so small an update changes only a few bf16 weights
            ours.send(version)
            time.sleep(0.01)  # lets the receiver start to wait
            before, began = getattr(sends, "bytes_sent", 0), time.perf_counter()
            sends.send(version, weights)
            seconds = ours.recv() - began
            return {"gb_per_s": size / 1e9 / seconds, "bytes": getattr(sends, "bytes_sent", size) - before or size}

        serve(channel, sent, versions=versions("torch"))
        ours.send(None)
        other.join(10)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
