"""Runs on Ray whose trainer and explorers each reserve a GPU of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny import metrics, tiny_run

import rollmill
from rollmill.errors import ConfigError
from rollmill.ray_session import abandon_ray

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPUS = 3
BF16_GAP = 0.03  # as in test_run_files.py
ASYNCHRONOUS: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 3,
    "max_staleness": 1,
    "trainer": {"precision": "bf16", "lr": 1e-4},
    "evaluation": None,
}
PLACEMENT = {"name": "ray", "explorers": 2, "cpus": 0.1, "gpus": 1, "trainer_gpus": 1}
PLUGIN = """
import os
from pathlib import Path

if (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
    Path({folder!r}, gpus or "none").touch()
"""
"""Every process of a run imports it: it notes which GPUs Ray lets the process see."""


@pytest.fixture(scope="module")
def cluster(simulated: None) -> Iterator[None]:
    """A Ray that believes in GPUs; the runs of this process join it."""
    abandon_ray()
    ray.init(num_cpus=4, num_gpus=GPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    abandon_ray()


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"weights": "memory"}, id="memory"),
        pytest.param({"weights": "broadcast"}, id="broadcast"),
        pytest.param({"weights": "broadcast", "nccl": True}, id="broadcast by NCCL"),
        pytest.param({"explorers": 1, "trainer": {"ranks": 2, "sharding": "fsdp"}}, id="two ranks"),
    ],
)
def test_each_actor_has_a_gpu_of_its_own(changes: dict[str, Any], tmp_path: Path) -> None:
    placement = PLACEMENT | {key: value for key, value in changes.items() if key != "trainer"}
    trainer = ASYNCHRONOUS["trainer"] | changes.get("trainer", {})
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "gpus.py").write_text(PLUGIN.format(folder=str(seen)))
    run = {**ASYNCHRONOUS, "trainer": trainer, "placement": placement, "plugins": [str(tmp_path / "gpus.py")]}
    rollmill.run(tiny_run(tmp_path, **run), out=tmp_path / "out")
    updates = [each for each in metrics(tmp_path / "out") if "grad_norm" in each]
    assert [each["step"] for each in updates] == [1, 2, 3]
    assert max(each["grad_norm"] for each in updates) > 0
    assert max(each["logprob_gap/mean"] for each in updates if "logprob_gap/mean" in each) < BF16_GAP
    assert sorted(each.name for each in seen.iterdir() if each.name != "none") == ["0", "1", "2"]


@pytest.mark.usefixtures("cluster")
def test_more_gpus_than_ray_has_are_refused(tmp_path: Path) -> None:
    path = tiny_run(tmp_path, **ASYNCHRONOUS, placement=PLACEMENT | {"explorers": 3})
    with pytest.raises(ConfigError, match=r"reserve 4 GPUs, and Ray has 3; lower placement\.explorers"):
        rollmill.run(path, out=tmp_path / "out")
