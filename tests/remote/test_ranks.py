"""Ranks of the trainer as Ray actors: the same results, wherever they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.forks import Forks
from support.tiny import metrics, ran, tiny_run
from torch.testing import assert_close

from rollmill.config.loader import load_run
from rollmill.errors import ConfigError
from rollmill.ray_session import join
from rollmill.remote.placement_group import PlacementGroup, ResourceRequest
from rollmill.trackers.heartbeat import read_heartbeats

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

SHORT = {"stages": None, "steps": 4, "algorithm": {"name": "grpo"}, "evaluation": None}
TWO = {"lr": 1e-3, "ranks": 2}


@pytest.mark.slow
def test_ranks_do_not_share_a_gpu(tmp_path: Path) -> None:
    half = {"name": "ray", "trainer_gpus": 0.5}
    with pytest.raises(ConfigError, match=r"placement\.trainer_gpus: ranks cannot share a GPU, .*; reserve 1 for each"):
        load_run(tiny_run(tmp_path, **SHORT, trainer=TWO, placement=half))
    load_run(tiny_run(tmp_path, **SHORT, trainer={"ranks": 1}, placement=half))


def weights(run: Path) -> dict[str, Any]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_on_ray_compute_the_same_in_every_stage(tmp_path: Path) -> None:
    """Two stages with other ranks and shards; both sums are rounded alike."""
    sft = {"name": "warm", "algorithm": {"name": "sft", "batch": 8}, "steps": 3, "trainer": TWO | {"sharding": "fsdp"}}
    grpo = {"name": "repair", "algorithm": {"name": "grpo"}, "steps": 3, "trainer": TWO}
    stages = {"stages": [sft, grpo], "steps": None, "algorithm": None}
    here = ran(SHORT, tmp_path, "here", **stages)
    there = ran(SHORT, tmp_path, "there", **stages, placement={"name": "ray", "explorers": 1})
    assert_close(weights(there), weights(here), rtol=1e-5, atol=1e-6)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in metrics(there)] == pytest.approx([row[key] for row in metrics(here)], rel=1e-4)
    states = {beat.name: beat.ended for beat in read_heartbeats(there)}
    assert states == {"explorer 0": "done", "trainer": "done", "trainer rank 1": "done"}
    assert not (there / "ranks").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_room_has_a_place_for_each_rank() -> None:
    join(None)
    room = PlacementGroup([ResourceRequest(0.25), *[ResourceRequest(0.5)] * 2, ResourceRequest(0)], one_host=False)
    try:
        places = [room.options(number) for number in range(len(room))]
        assert [place["num_cpus"] for place in places] == [0.25, 0.5, 0.5, 0]
        found = [place["scheduling_strategy"].placement_group_bundle_index for place in places]
        assert found == [0, 1, 2, 0], "what reserves nothing goes where the first one is"
    finally:
        room.close()


NODE = """
import os
from pathlib import Path

import ray

if ray.is_initialized():
    Path("{}", str(os.getpid())).write_text(ray.get_runtime_context().get_node_id())
"""
"""A plugin, which every process of a run imports: writes down on which node it is."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, of 3 and 2 cores."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    made.add_node(num_cpus=2)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_on_two_nodes(cluster: Any, server: Forks, tmp_path: Path) -> None:
    """Trainer and rank reserve 2 cores each, so they are on different nodes."""
    here = ran(SHORT, tmp_path, "here", trainer=TWO)
    there, nodes = tmp_path / "there", tmp_path / "nodes"
    for folder in (there, nodes):
        folder.mkdir()
    (there / "node.py").write_text(NODE.format(nodes))
    placement = {"name": "ray", "address": cluster.address, "weights": "folder", "trainer_cpus": 2}
    tiny_run(there, **SHORT, trainer=TWO, placement=placement, plugins=["node.py"])
    command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", "out"]
    found = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)  # has the cluster's token
    assert found.returncode == 0, found.stderr
    node = {beat.name: (nodes / str(beat.pid)).read_text() for beat in read_heartbeats(there / "out")}
    assert node["trainer"] != node["trainer rank 1"]
    assert_close(weights(there / "out"), weights(here), rtol=1e-5, atol=1e-6)
    shown = server.run("status", "out", folder=there)
    assert "trainer rank 1" in shown.out
