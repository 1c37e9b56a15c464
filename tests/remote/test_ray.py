"""Explorers on Ray compute what explorers in the trainer's process compute, and are replaced when they die or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.tiny import tiny_run

import rollmill
from rollmill.errors import ConfigError, EngineError, RewardError

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HURT = """
import os

import rollmill


@rollmill.workflow
async def hurt(task, policy, judge, *, signal_number: int = 9, times: int = 1):
    reply = await policy.complete(task.prompt)
    for n in range(times):
        try:
            os.close(os.open("hurt-%d" % n, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal_number)
    return await judge(reply)
"""
"""A workflow that kills or stops the process it runs in, once for each `times`."""


def ran(folder: Path, name: str, **changes: Any) -> Path:
    folder = folder / name
    folder.mkdir()
    rollmill.run(tiny_run(folder, **changes), out=folder / "out")
    return folder / "out"


def tokens(run: Path, kind: str) -> list[Any]:
    """What was rolled out and how it was judged; log-probs are left out, which depend on what shares a batch by
    rounding."""
    files = sorted((run / kind).glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.open()]
    return [(row["id"], row["response"], row["reward"]) for row in rows]


def test_synchronous_explorers_on_ray_compute_the_same(tmp_path: Path) -> None:
    here = ran(tmp_path, "here")
    path, there = tiny_run(tmp_path, placement={"name": "ray", "explorers": 2}), tmp_path / "there"
    command = [sys.executable, "-m", "rollmill", "run", path, "--out", there]
    subprocess.run(command, check=True, capture_output=True)  # Ray itself starts its workers: see forks.py
    for kind in ("rollouts", "evaluations"):
        assert len(tokens(here, kind)) > 20
        assert tokens(there, kind) == tokens(here, kind)
    losses = [[json.loads(row).get("loss") for row in (run / "metrics.jsonl").open()] for run in (here, there)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("weights", ["memory", pytest.param("folder", marks=pytest.mark.thorough)])
def test_stale_explorers_stay_within_the_bound(tmp_path: Path, weights: str) -> None:
    stage = {"max_staleness": 2, "steps": 8, "algorithm": {"name": "grpo"}, "evaluation": None, "stages": None}
    out = ran(tmp_path, "run", placement={"name": "ray", "explorers": 1, "weights": weights}, **stage)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert max(row["staleness/max"] for row in steps) <= 2
    assert max(row["staleness/max"] for row in steps) > 0
    gaps = [row["logprob_gap/max"] for row in steps if "logprob_gap/max" in row]
    assert len(gaps) > 0
    assert max(gaps) < 1e-4
    run_id = json.loads((out / "machine.json").read_text())["run_id"]
    assert not list(Path("/dev/shm").glob(f"rollmill-{run_id}*"))


def hurting(tmp_path: Path, times: int = 1, signal_number: int = 9, **placement: Any) -> list[dict[str, Any]]:
    (tmp_path / "hurt.py").write_text(HURT.replace('"hurt-%d"', f'"{tmp_path}/hurt-%d"'))
    workflow = {"name": "hurt", "times": times, "signal_number": signal_number}
    more = {"steps": 4, "algorithm": {"name": "grpo"}, "evaluation": None, "stages": None}
    more |= {"workflow": workflow, "plugins": [str(tmp_path / "hurt.py")]}
    out = ran(tmp_path, "run", placement={"name": "ray", "explorers": 1, **placement}, **more)
    tasks = [json.loads(line) for file in sorted((out / "rollouts").glob("*.jsonl")) for line in file.open()]
    ids = [row["id"] for row in tasks]
    assert len(ids) == len(set(ids)) == 4 * 4 * 4
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_killed_explorer_is_replaced_and_its_tasks_are_run_again(tmp_path: Path) -> None:
    assert sum(row.get("explorer/replaced", 0) for row in hurting(tmp_path)) == 1


@pytest.mark.thorough
def test_an_explorer_that_hangs_is_replaced(tmp_path: Path) -> None:
    rows = hurting(tmp_path, signal_number=19, health_s=10.0)  # SIGSTOP
    assert sum(row.get("explorer/replaced", 0) for row in rows) == 1


@pytest.mark.thorough
def test_explorers_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"2 explorers died within one step, the last one \(explorer \d\)"):
        hurting(tmp_path, times=9, replacements=1, explorers=2)


@pytest.mark.thorough
def test_what_a_reward_raises_elsewhere_is_raised_here(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(task, completion):\n    raise ValueError('no good')\n")
    rewards = [{"name": "python", "function": f"{tmp_path}/mine.py:mine"}]
    with pytest.raises(RewardError, match="no good"):
        ran(tmp_path, "run", placement="ray", rewards=rewards, stages=None, steps=1, algorithm={"name": "grpo"})


@pytest.mark.thorough
def test_more_explorers_than_cores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"explorers and trainer reserve 1998 cores, and Ray has \d+"):
        ran(tmp_path, "run", placement={"name": "ray", "explorers": 2, "cpus": 999}, stages=None)


def test_no_ray_at_an_address(server: Forks, tmp_path: Path) -> None:
    tiny_run(tmp_path, placement={"name": "ray", "address": "127.0.0.1:9"}, stages=None)
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 2, ended.err
    assert "placement.address: no Ray at 127.0.0.1:9" in ended.err
