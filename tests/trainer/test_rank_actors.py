"""Ranks that are Ray actors compute, bit for bit, what ranks that are child processes compute; one that is lost may be
started again, one that fails may not."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.algorithm_batches import LIMIT, batch_for, flat, options_of, record
from support.forks import ended
from torch import Tensor
from torch.utils._pytree import tree_flatten

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import TrainerRankLostError, TrainingError
from rollmill.ray_session import join
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.trainer import DistributedTrainer
from rollmill.trainer.distributed.rank_handle import RankLauncher
from rollmill.trainer.distributed.ranks import WATCHDOG, FileRendezvous, join_group, leave_group, open_rendezvous_port
from rollmill.trainer.distributed.ray_ranks import RayRankLauncher
from rollmill.trainer.distributed.spec import TrainerSpec
from rollmill.types import Experience

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

OPTIONS = options_of("ppo", kl=0.1, critic={"lr": 1e-3, "warmup_steps": 1})
CPU = torch.device("cpu")
NOTHING = {"num_cpus": 0, "num_gpus": 0}


def test_ranks_meet_at_a_port_of_one_address_only() -> None:
    meeting, store = open_rendezvous_port("127.0.0.1")
    assert meeting.interface() in {name for name in psutil.net_if_addrs() if name.startswith("lo")}
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == meeting.port] == ["127.0.0.1"]
    join_group(meeting, 0, 1, CPU, 20)
    try:
        assert dist.get_world_size() == 1
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    finally:
        leave_group()
    del store


@pytest.mark.parametrize(("chosen", "handling"), [(None, "2"), ("3", "3")])
def test_nccl_ends_what_waits_and_not_the_process_unless_the_user_wants_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, handling: str
) -> None:
    monkeypatch.delenv(WATCHDOG, raising=False)
    if chosen is not None:
        monkeypatch.setenv(WATCHDOG, chosen)
    seen: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **_: seen.append((backend, os.environ.get(WATCHDOG)))
    )
    join_group(FileRendezvous(tmp_path), 0, 1, torch.device("cuda"), 5)
    assert seen == [("cpu:gloo,cuda:nccl", handling)]
    assert os.environ.get(WATCHDOG) == chosen


def test_gpus_are_a_ranks_own_where_each_reserves_some() -> None:
    assert RayRankLauncher([{"num_cpus": 0, "num_gpus": 1}]).own_gpus
    assert not RayRankLauncher([NOTHING]).own_gpus
    assert not RayRankLauncher([{"num_gpus": 0.5}]).own_gpus
    assert RayRankLauncher([{"num_gpus": 1}]).own_gpus


@pytest.fixture(scope="module", autouse=True)
def session(request: pytest.FixtureRequest) -> None:
    """Ray, where a chosen test needs it."""
    if any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path):
        join(None)


@contextmanager
def ranked(
    model: Any, folder: Path, launcher: RankLauncher | None, plugins: tuple[Path, ...] = (), **keys: Any
) -> Iterator[Any]:
    settings = {"lr": 1e-3, "eps": 1e-4, "micro_batch_tokens": 40, "updates_per_batch": 2, "ranks": 2}
    plan = replace(TrainerSpec(OPTIONS, TrainerConfig(**settings | keys), "fp32", 10, LIMIT, seed=3), plugins=plugins)
    trainer = DistributedTrainer(plan, model, None, CPU, folder, launcher)
    try:
        yield trainer
    finally:
        trainer.close()


def on_ray(model: Any, folder: Path, **keys: Any) -> Any:
    return ranked(model, folder, RayRankLauncher([NOTHING]), **keys)


def pid_of(folder: Path) -> int:
    (beat,) = read_heartbeats(folder)
    assert (beat.name, beat.doing, beat.waits_for) == ("trainer rank 1", "rest", "rank 0")
    return beat.pid


@pytest.fixture(scope="module")
def steps(toy: Any, make_batch: Any) -> list[list[Experience]]:
    batches = [batch_for(make_batch, OPTIONS, seed) for seed in range(3)]
    for batch in batches:
        record(toy("qwen3"), batch, 0.2)
    return batches


def learned(pair: DistributedTrainer, model: Any, steps: list[list[Experience]]) -> tuple[Any, ...]:
    """Metrics, weights and state of two steps, and metrics of a third one from that state, with passes made ahead."""
    metrics = [pair.step(batch, 0) for batch in steps[:2]]
    state = copy.deepcopy(pair.state_dict())
    pair.load_state_dict(state)
    for _ in pair.precompute(steps[2], 2):
        pass
    pair.gather_policy()
    weights = flat(model).clone()
    last = pair.step(steps[2], 2)
    pair.gather_policy()
    return metrics, weights, state, last, flat(model)


def ends(pid: int, limit_s: float = 60.0) -> bool:
    """Whether a process ends; Ray says that it is gone a moment before."""
    limit = time.monotonic() + limit_s
    while not ended(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    return ended(pid)


def assert_equal(got: Any, expected: Any) -> None:
    """Bit for bit."""
    (leaves, shape), (others, other_shape) = tree_flatten(got), tree_flatten(expected)
    assert shape == other_shape
    for leaf, other in zip(leaves, others, strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("none", marks=pytest.mark.thorough)])
def test_actors_learn_what_processes_learn(toy: Any, steps: Any, tmp_path: Path, sharding: str) -> None:
    model, other = toy("qwen3"), toy("qwen3")
    with ranked(model, tmp_path / "processes", None, sharding=sharding) as pair:
        expected = learned(pair, model, steps)
    with on_ray(other, tmp_path / "actors", sharding=sharding) as pair:
        got = learned(pair, other, steps)
        pid = pid_of(tmp_path / "actors")
    assert_equal(got, expected)
    assert [beat.ended for beat in read_heartbeats(tmp_path / "actors")] == ["done"]
    assert ends(pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_that_is_killed_in_a_step_is_lost(toy: Any, steps: Any, tmp_path: Path) -> None:
    with on_ray(toy("qwen3"), tmp_path) as pair:
        pair.start()
        pid = pid_of(tmp_path)
        os.kill(pid, signal.SIGSTOP)  # so that rank 0 is in the middle of the step when it dies
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(TrainerRankLostError, match=rf"rank 1 \(process {pid} on \S+\), told to `step`, ended: "):
            pair.step(steps[0], 0)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_that_hangs_is_lost_at_the_deadline(toy: Any, steps: Any, tmp_path: Path) -> None:
    with on_ray(toy("qwen3"), tmp_path, rank_deadline_s=4) as pair:
        pair.start()
        pid = pid_of(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            TrainerRankLostError, match=r"told to `step`, did not answer for 4 s\. Raise trainer\.rank_dead"
        ):
            pair.step(steps[0], 0)
    assert ends(pid)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_an_actor_raises_would_be_raised_again(toy: Any, tmp_path: Path) -> None:
    plugin = tmp_path / "elsewhere.py"
    plugin.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('no such scanner')\n")
    said = r"(?s)rank 1 \(process .*`start`, failed: ConfigError.*no such scanner.*logs of Ray's session"
    with on_ray(toy("qwen3"), tmp_path, plugins=(plugin,)) as pair, pytest.raises(TrainingError, match=said) as raised:
        pair.start()
    assert not isinstance(raised.value, TrainerRankLostError)
