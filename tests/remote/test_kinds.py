"""Explorers of several kinds in one run on Ray: each has the engine and the threads of its kind, in every life."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run
from support.vllm_service import PYTHON, needs_vllm

import rollmill
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.orchestrator.engine import shared_checksum
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.weights.layout import CRC32, XXH3

GRPO: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}}
SEEN = """
import json, os, signal
from pathlib import Path

import psutil
import torch

import rollmill

HERE = Path(__file__).parent


@rollmill.workflow
async def seen(task, policy, judge, *, ends_one: bool = False):
    reply = await policy.complete(task.prompt)
    programs = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    line = {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "vllm": any("rollmill.engines.vllm.worker" in each for each in programs),
    }
    with (HERE / "seen.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    mark = HERE / "ended"
    if ends_one and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return await judge(reply)
"""
"""A workflow that tells which process it runs in, and may end the first one."""


def ran(folder: Path, explorers: Sequence[dict[str, Any]], **changes: Any) -> Path:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    (folder / "seen.py").write_text(SEEN)
    placement = {"name": "ray", "explorers": list(explorers)}
    more = {"workflow": "seen", "plugins": [str(folder / "seen.py")], "placement": placement}
    rollmill.run(tiny_run(folder, **GRPO | more | changes), out=folder / "out")
    return folder / "out"


def told(folder: Path) -> list[dict[str, Any]]:
    """What the workflow saw of the processes, rollout by rollout."""
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def python(folder: Path, name: str, *, xxhash: bool) -> Path:
    """A program that answers as a Python with vLLM does when it is looked at."""
    found = json.dumps({"vllm": True, "xxhash": xxhash, "version": [3, 12]})
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{found}'\n")
    path.chmod(0o755)
    return path


def test_shared_weights_are_verified_by_what_every_kind_has(tmp_path: Path) -> None:
    with_it = VLLMEngineConfig(python=python(tmp_path, "with", xxhash=True))
    without = VLLMEngineConfig(python=python(tmp_path, "without", xxhash=False))
    stage = StageConfig()
    for engines, expected in (([None], XXH3), ([None, with_it], XXH3), ([with_it, None, without], CRC32)):
        assert shared_checksum(stage.with_engine(engine) for engine in engines) == expected


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_explorer_has_the_threads_of_its_kind(tmp_path: Path) -> None:
    kinds = [{"cpus": 0.5, "engine": "native"}, {"cpus": 0.5, "threads": 2}]
    out = ran(tmp_path, kinds, steps=2)
    assert [row["step"] for row in metrics(out)] == [0, 1, 2]
    pids = {beat.name: beat.pid for beat in read_heartbeats(out)}
    rolled = {(line["pid"], line["threads"]) for line in told(tmp_path)}
    assert rolled == {(pids["explorer 0"], 1), (pids["explorer 1"], 2)}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_that_takes_a_dead_one_s_place_is_of_its_kind(tmp_path: Path) -> None:
    workflow = {"name": "seen", "ends_one": True}
    out = ran(tmp_path, [{"threads": 2}], steps=2, evaluation=None, workflow=workflow)
    assert [row["step"] for row in metrics(out)] == [1, 2]
    assert sum(row.get("explorer/replaced", 0) for row in metrics(out)) == 1
    assert len({line["pid"] for line in told(tmp_path)}) == 2
    assert {line["threads"] for line in told(tmp_path)} == {2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_room_is_reserved_for_every_explorer_of_every_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reserve 801 cores"):
        ran(tmp_path, [{}, {"count": 2, "cpus": 400}], steps=1)


@pytest.mark.thorough
@pytest.mark.service
@pytest.mark.timeout(600)
@needs_vllm
def test_vllm_and_the_native_engine_roll_out_together(tmp_path: Path) -> None:
    vllm = {"name": "vllm", "python": str(PYTHON), "cache_gb": 0.1}
    kinds = [{"cpus": 0.5, "engine": vllm}, {"cpus": 0.5}]
    model = {"new": {"hidden_size": 96, "heads": 3}}
    out = ran(tmp_path, kinds, steps=4, model=model, max_staleness=1)
    assert [row["step"] for row in metrics(out)] == [0, 1, 2, 3, 4]
    steps = [row for row in metrics(out) if "logprob_gap/mean" in row]
    assert max(row["logprob_gap/mean"] for row in steps) < 1e-3
    assert max(row["staleness/max"] for row in steps) <= 1
    pids = {beat.name: beat.pid for beat in read_heartbeats(out)}
    rolled = [(line["pid"], line["vllm"]) for line in told(tmp_path)]
    assert set(rolled) == {(pids["explorer 0"], True), (pids["explorer 1"], False)}
    assert min(rolled.count(each) for each in set(rolled)) >= 16


TELLS = """
import rollmill
from rollmill.engines.native import NativeEngine
from rollmill.waiting import OUTAGES

counters, told = NativeEngine.counters, []
NativeEngine.counters = lambda self: counters(self) | {"restarts": len(told)}


@rollmill.workflow
async def tells(task, policy, judge):
    if not told:
        told.append("vLLM's process was killed")
        OUTAGES.tell(told[0])
    return await judge(await policy.complete(task.prompt))
"""
"""An engine that was restarted in the first rollout of its process."""


@pytest.mark.slow
def test_what_an_explorer_gets_over_is_in_the_runs_log_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    (tmp_path / "tells.py").write_text(TELLS)
    keys = {"workflow": "tells", "plugins": ["tells.py"], "placement": {"name": "ray", "explorers": 1}, "steps": 2}
    path = tiny_run(tmp_path, **GRPO | keys | {"evaluation": None})
    rollmill.run(path, out=tmp_path / "out")
    told = [each for each in capsys.readouterr().out.splitlines() if "was killed" in each]
    assert [each.partition(": ")[2] for each in told] == ["vLLM's process was killed"]
    assert (tmp_path / "out/events.jsonl").read_text().count("was killed") == 1
    assert [each.get("engine/restarts") for each in metrics(tmp_path / "out") if "loss" in each] == [1.0, None]
