"""Two processes that form a process group, for what they compute together."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.forks import ForkedPopen

RANKS, DEADLINE_S = 2, 200


def computed_by_ranks(compute: Callable[[int, Any], Any], jobs: Any, folder: Path) -> list[Any]:
    """What a function of a test's module returns for a rank and the jobs, in a process for each rank."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    code = "import sys; from support.rank_processes import work; work(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    errors, running = [folder / f"errors-{rank}" for rank in range(RANKS)], []
    for rank, path in enumerate(errors):
        command = [sys.executable, "-c", code, compute.__module__, compute.__name__, str(rank), folder]
        with path.open("wb") as file:
            running.append(ForkedPopen(command, stderr=file, env=environment))
    end = time.monotonic() + DEADLINE_S
    try:
        while (codes := [each.poll() for each in running]) != [0] * RANKS:
            assert not any(codes), "".join(path.read_text() for path in errors)
            assert time.monotonic() < end, f"the processes did not end within {DEADLINE_S} s"
            time.sleep(0.02)
    finally:
        for each in running:
            each.kill()
            each.wait()
    return [pickle.loads((folder / f"results-{rank}").read_bytes()) for rank in range(RANKS)]


def work(module: str, name: str, number: str, given: str) -> None:
    """The program of such a process."""
    rank, folder, compute = int(number), Path(given), getattr(import_module(module), name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    method, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS, timeout=timeout)
    results = compute(rank, pickle.loads((folder / "jobs").read_bytes()))
    dist.destroy_process_group()
    (folder / f"results-{rank}").write_bytes(pickle.dumps(results))
