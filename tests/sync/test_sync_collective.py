"""Weights by broadcast between two ranks (gloo)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rollmill.core.errors import SyncError
from rollmill.sync import CollectiveSync


def weights(rank: int, version: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(version)
    made = {"a": torch.randn(100, 3, generator=source), "b": torch.randn(7, generator=source).bfloat16()}
    return (
        made | {"large": torch.randn(5000, generator=source)}
        if rank == 0
        else {name: torch.zeros_like(each) for name, each in made.items()} | {"large": torch.zeros(5000)}
    )


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    sync = CollectiveSync(weights(rank, 0), bucket=2000)
    for version in (3, 4):
        mine = weights(rank, version)
        assert sync.transfer(version if rank == 0 else -1, mine) == version
        assert all(torch.equal(mine[name], each) for name, each in weights(0, version).items())
    _damaged(rank, sync)
    try:
        CollectiveSync({"a": torch.zeros(2 + rank)})
        refused = False
    except SyncError as error:
        refused = "a of the model of rank 1 has shape (3,); the one that is sent is (2,)" in str(error)
    Path(folder, f"rank-{rank}").write_text(str(refused))
    dist.destroy_process_group()


def _damaged(rank: int, sync: CollectiveSync) -> None:
    """What arrives at rank 1 is changed on the way; both ranks say so."""
    plain = dist.broadcast

    def broadcast(tensor: Tensor, *rest: object) -> None:
        plain(tensor, *rest)
        if rank == 1 and tensor.dtype == torch.uint8:
            tensor[5] ^= 1

    dist.broadcast = broadcast
    with pytest.raises(SyncError, match="version 5 of the weights arrived damaged on 1 of the ranks"):
        sync.transfer(5, weights(rank, 5))
    dist.broadcast = plain


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["False", "True"]
