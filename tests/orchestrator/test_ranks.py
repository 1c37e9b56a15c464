"""A run with several ranks gives what a run with one gives, and goes on with another number of them."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from support.tiny import GRPO, SFT, tiny_run

from rollmill.errors import TrainingError
from rollmill.launch import resume, run
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.run_views import PlainView
from rollmill.trainer import DistributedTrainer
from rollmill.trainer.distributed.rank_handle import ProcessRankHandle
from rollmill.types import Experience

RL: dict[str, Any] = {
    "stages": None,
    "model": {"new": {"heads": 2, "kv_heads": 2}},
    "algorithm": {"name": "ppo", "kl": 0.05, "critic": {"lr": 1e-3}},
    "steps": 4,
    "checkpoint": {"keep_last": 9},
}
SAME = ("loss", "grad_norm", "value/loss", "value/grad_norm", "kl_ref", "entropy", "reward/mean", "tokens", "lr")


def quiet() -> PlainView:
    return PlainView(io.StringIO())


def started(folder: Path, **trainer: Any) -> Path:
    run(tiny_run(folder, **RL, trainer={"lr": 1e-3} | trainer), out=folder / "out", view=quiet())
    return folder / "out"


def assert_same(got: Path, expected: Path) -> None:
    """Metrics, weights of the last checkpoint and what was rolled out."""
    rows, others = read_metrics(got), read_metrics(expected)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        kept = {key: other[key] for key in SAME if key in other}
        assert {key: row[key] for key in kept} == pytest.approx(kept, rel=1e-4, abs=1e-5), row["step"]
    assert "kl_ref" in others[-1]
    assert "value/loss" in others[-1]
    (one, two) = (sorted((each / "checkpoints").glob("step-*"))[-1] / "model.safetensors" for each in (got, expected))
    weights, wanted = load_file(one), load_file(two)
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        assert (weight - wanted[name]).abs().max() < 1e-5


def with_ranks(run_dir: Path, to: Path, **trainer: Any) -> Path:
    """A copy of a run as it was after its second step, with other ranks from then on."""
    shutil.copytree(run_dir, to)
    for later in ("step-000003", "step-000004"):
        shutil.rmtree(to / "checkpoints" / later, ignore_errors=True)
    config = yaml.safe_load((to / "config.yaml").read_text())
    for key in ("ranks", "sharding", "rank_deadline_s"):
        config["trainer"].pop(key, None)
    config["trainer"] |= trainer
    (to / "config.yaml").write_text(yaml.safe_dump(config))
    return to


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one rank."""
    return started(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", ["fsdp", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("tensor", "context"))]
)
def test_a_run_does_not_depend_on_its_ranks_nor_on_how_many_go_on_with_it(
    alone: Path, tmp_path: Path, cut: str
) -> None:
    two = {"ranks": 2, "sharding": cut}
    pair = started(tmp_path, **two)
    assert_same(pair, alone)
    assert all("seconds/inference" in row for row in read_metrics(pair)[1:])  # while rewards are awaited
    assert (pair / "ranks/rank-1.log").is_file()
    for run_dir, trainer in ((pair, {}), (alone, two)):
        again = with_ranks(run_dir, tmp_path / f"again-{len(trainer)}", **trainer)
        resume(again, view=quiet())
        assert_same(again, alone)


@pytest.mark.slow
def test_a_run_whose_rank_dies_says_so_and_goes_on_from_its_checkpoint(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DistributedTrainer.step

    def dying(self: DistributedTrainer, experiences: list[Experience], version: int, *probes: Any) -> dict[str, float]:
        if version == 3:
            (other,) = self._others
            assert isinstance(other, ProcessRankHandle)
            os.kill(other.pid, signal.SIGKILL)
        return step(self, experiences, version, *probes)

    with monkeypatch.context() as patch:
        patch.setattr(DistributedTrainer, "step", dying)
        with pytest.raises(TrainingError, match=r"rank 1 \(process \d+\), told to `step`, was killed by signal 9"):
            started(tmp_path, ranks=2)
    resume(tmp_path / "out", view=quiet())
    assert_same(tmp_path / "out", alone)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_ranks_with_shards_go_on_from_the_checkpoint_before_a_damaged_one(alone: Path, tmp_path: Path) -> None:
    pair = started(tmp_path, ranks=2, sharding="fsdp")
    newest = pair / "checkpoints/step-000004"
    content = bytearray((newest / "trainer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "trainer.pt").write_bytes(content)
    said = io.StringIO()
    resume(pair, view=PlainView(said))
    assert "the checkpoint of step 4 is damaged (trainer.pt has other content" in said.getvalue()
    assert "goes on from the checkpoint of step 2" in said.getvalue()
    assert (pair / "checkpoints/damaged-000004").is_dir()
    assert_same(pair, alone)


@pytest.mark.slow
def test_stages_and_checkpoints_have_whole_weights_where_no_rank_keeps_them(tmp_path: Path) -> None:
    """In bf16 the engine decodes with a copy of its own, and the policy's model is empty between two uses."""
    trainer = {"precision": "bf16", "ranks": 2, "sharding": "fsdp"}
    stages = [SFT | {"steps": 2}, GRPO | {"steps": 3}]
    path = tiny_run(tmp_path, trainer=trainer, stages=stages, checkpoint={"every": 1, "keep_last": 9})
    run(path, out=tmp_path / "out", view=quiet())
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "out", again)
    for later in ("step-000004", "step-000005"):
        shutil.rmtree(again / "checkpoints" / later)
    resume(again, view=quiet())
    kept = [load_file(tmp_path / f"out/checkpoints/step-00000{step}/model.safetensors") for step in range(1, 6)]
    for before, after in itertools.pairwise(kept):
        assert any(not torch.equal(after[name], each) for name, each in before.items())
    last = load_file(again / "checkpoints/step-000005/model.safetensors")
    assert last.keys() == kept[-1].keys()
    for name, weight in kept[-1].items():
        assert torch.equal(last[name], weight), name
    assert any(not torch.equal(each, each.bfloat16().float()) for each in last.values())
    gaps = [row["logprob_gap/mean"] for row in read_metrics(tmp_path / "out") if "logprob_gap/mean" in row]
    assert len(gaps) == 3
    assert max(gaps) < 0.03  # rounding to 8 bits
