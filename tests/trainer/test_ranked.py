"""Ranks that a stage starts: a state goes on with any number of them, and none that ends or hangs holds up the run."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.algorithm_batches import LIMIT, batch_for, flat, options_of, record
from torch import Tensor, nn

from rollmill.config import section as parts
from rollmill.config.algorithms import known_algorithms
from rollmill.config.model import LoRAConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import DeadlineError, TrainingError
from rollmill.models.lora import add_lora
from rollmill.registry import import_file
from rollmill.trackers.heartbeat import read_heartbeats
from rollmill.trainer import DistributedTrainer
from rollmill.trainer.distributed import rank_handle
from rollmill.trainer.distributed.fsdp import local_shards
from rollmill.trainer.distributed.rank_handle import ProcessRankHandle, ProcessRankLauncher
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.spec import TrainerSpec
from rollmill.types import Experience
from rollmill.weights import buckets
from rollmill.weights.buckets import fill_buckets, pack_block
from rollmill.weights.layout import BlockLayout

OPTIONS = options_of("ppo", kl=0.1, critic={"lr": 1e-3, "warmup_steps": 1})
CPU = torch.device("cpu")


def plan_of(**config: Any) -> TrainerSpec:
    settings = {"lr": 1e-3, "eps": 1e-4, "micro_batch_tokens": 40, "updates_per_batch": 2, "epochs_per_batch": 2}
    return TrainerSpec(OPTIONS, TrainerConfig(**settings | config), "fp32", 10, LIMIT, seed=3)


@contextmanager
def ranked(model: nn.Module, logs: Path, **config: Any) -> Iterator[DistributedTrainer]:
    trainer = DistributedTrainer(plan_of(ranks=2, **config), model, None, CPU, logs)
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in interpreters of their own, as users have them; forks.py has the others forked."""
    monkeypatch.setattr(rank_handle, "subprocess", subprocess)


@pytest.fixture(scope="module")
def steps(toy: Any, make_batch: Any) -> list[list[Experience]]:
    batches = [batch_for(make_batch, OPTIONS, seed) for seed in range(4)]
    for batch in batches:
        record(toy("qwen3"), batch, 0.2)
    return batches


def assert_equal(got: Any, expected: Any) -> None:
    """Metrics and weights, up to rounding in fp32; a state dict bit for bit in what is no float."""
    assert got[0] == [pytest.approx(each, rel=2e-5, abs=2e-5) for each in expected[0]]
    assert (got[1] - expected[1]).norm() < 2e-5 * expected[1].norm()


def pids(trainer: DistributedTrainer) -> list[int]:
    return [other.pid for other in trainer._others if isinstance(other, ProcessRankHandle)]


@dataclass
class Alone:
    """What one rank does: metrics and weights of two steps, its state after them, metrics and weights at the end."""

    early: tuple[list[dict[str, float]], Tensor]
    state: dict[str, Any]
    model: nn.Module
    late: tuple[list[dict[str, float]], Tensor]


@pytest.fixture(scope="module")
def alone(toy: Any, steps: Any) -> Alone:
    trainer = plan_of().trainer(toy("qwen3"), None, CPU, RankGroup())
    metrics = [trainer.step(batch, 0) for batch in steps[:2]]
    state, model = copy.deepcopy(trainer.state_dict()), copy.deepcopy(trainer.model)
    late = [trainer.step(batch, 2) for batch in steps[2:]]
    return Alone((metrics, flat(model)), state, model, (late, flat(trainer.model)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["fsdp", "tensor", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("none", "context"))]
)
def test_one_rank_goes_on_where_two_were(toy: Any, steps: Any, alone: Alone, tmp_path: Path, sharding: str) -> None:
    whole = toy("qwen3")
    with ranked(whole, tmp_path, sharding=sharding) as pair:
        metrics = [pair.step(batch, 0) for batch in steps[:2]]
        pair.gather_policy()
        assert_equal((metrics, flat(whole)), alone.early)
        held = sum(part.numel() for part in local_shards(list(pair.own.model.parameters())))
        assert held == pytest.approx(flat(whole).numel() * {"fsdp": 0.5, "tensor": 0.54}.get(sharding, 1), rel=0.02)
        assert isinstance(pair._launcher, ProcessRankLauncher)
        assert [path.name for path in pair._launcher.folder.iterdir()] == ["rendezvous"]
        (beat,) = read_heartbeats(tmp_path)
        assert (beat.name, beat.pid, beat.doing, beat.waits_for) == ("trainer rank 1", *pids(pair), "rest", "rank 0")
        resumed = plan_of().trainer(copy.deepcopy(whole), None, CPU, RankGroup())
        resumed.load_state_dict(pair.state_dict())
        assert_equal(([resumed.step(batch, 2) for batch in steps[2:]], flat(resumed.model)), alone.late)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["fsdp", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("tensor", "context"))]
)
@pytest.mark.usefixtures("fresh")
def test_two_ranks_go_on_where_one_was(steps: Any, alone: Alone, tmp_path: Path, sharding: str) -> None:
    model = copy.deepcopy(alone.model)
    with ranked(model, tmp_path, sharding=sharding) as pair:
        pair.load_state_dict(copy.deepcopy(alone.state))
        metrics = [pair.step(batch, 2) for batch in steps[2:]]
        pair.gather_policy()
        assert_equal((metrics, flat(model)), alone.late)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("tensor", marks=pytest.mark.thorough)])
def test_shards_are_sent_as_whole_weights_are_and_leave_no_copy(
    toy: Any, steps: Any, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 5000)
    whole = toy("qwen3")
    with ranked(whole, tmp_path, sharding=sharding) as pair:
        before = {name: each.detach().clone() for name, each in whole.named_parameters()}
        layout = BlockLayout.of(before, torch.bfloat16)
        assert len(layout.buckets(5000)) > 3
        blocks = [torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2)]
        sums = [pack_block(pair.sharded_weights() or {}, layout, blocks[0])]  # there are no ranks yet
        pair.start(keeps_policy=False)
        assert not any(each.untyped_storage().nbytes() for each in whole.parameters())
        sums += [pack_block(before, layout, blocks[1]), pack_block(pair.sharded_weights() or {}, layout, blocks[0])]
        assert len(set(sums)) == 1
        assert torch.equal(*blocks)
        weights = pair.sharded_weights()
        assert isinstance(weights, buckets.ShardedWeights)
        stopped = fill_buckets(weights, layout, lambda bucket: bucket.of(blocks[0]))
        next(stopped)
        stopped.close()  # the other rank sends what nobody takes
        metrics = [pair.step(batch, 0) for batch in steps[:2]]
        pair.gather_policy()
        assert_equal((metrics, flat(whole)), alone.early)
        assert pack_block(weights, layout, blocks[0]) == pack_block(dict(whole.named_parameters()), layout, blocks[1])
        pair.step(steps[2], 2)
        assert not any(each.untyped_storage().nbytes() for each in whole.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_passes_made_ahead_are_used_by_all_ranks(
    toy: Any, steps: Any, alone: Alone, tmp_path: Path, sharding: str
) -> None:
    """As far as anybody asks for them, and to their end where nobody does."""
    model, found = toy("qwen3"), []
    with ranked(model, tmp_path, sharding=sharding) as pair:
        for step, batch in enumerate(steps[:2]):
            passes = pair.precompute(batch, 0)
            for _ in range(3 if step else 100):
                next(passes, None)
            del passes
            found.append(pair.step(batch, 0))
        pair.gather_policy()
        assert_equal((found, flat(model)), alone.early)


MINE = """
import rollmill
@rollmill.loss
def cautious(logprob, old_logprob, advantage, *, strength: float = 1.0):
    return -strength * advantage * (logprob - old_logprob).exp().clamp(max=1.1)
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a user's loss", "distill", "reward_model", "adapters", "shared rows"])
def test_what_a_rank_is_given_reaches_it(
    toy: Any, make_batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A user's file, a teacher, another learner, adapters, these on shared rows: two ranks learn what one does, in
    equal models."""
    monkeypatch.setattr(parts, "_registered", {})
    keys: dict[str, Any] = {"a user's loss": {"loss": {"name": "cautious", "strength": 2.0}}}.get(name, {})
    if name == "a user's loss":
        (tmp_path / "mine.py").write_text(MINE)
        import_file(tmp_path / "mine.py")
    options = options_of(name if name in known_algorithms() else "grpo", **keys)
    batches = [batch_for(make_batch, options, seed) for seed in (0, 1)]
    model = toy("qwen3")
    if name in ("adapters", "shared rows"):
        add_lora(model, LoRAConfig(rank=2), seed=0)
    other, teacher = copy.deepcopy(model), toy("qwen3", seed=5) if name == "distill" else None
    single = replace(plan_of(), algorithm=options).trainer(model, teacher, CPU, RankGroup())
    metrics = [single.step(batch, 0) for batch in batches]
    plugins = (tmp_path / "mine.py",) if keys else ()
    shared: dict[str, Any] = {"sharding": "context", "gradient_checkpointing": True} if name == "shared rows" else {}
    pair = DistributedTrainer(
        replace(plan_of(ranks=2, **shared), algorithm=options, plugins=plugins), other, teacher, CPU, tmp_path
    )
    try:
        got = [pair.step(batch, 0) for batch in batches]
        assert_equal((got, flat(pair.own.model)), (metrics, flat(single.model)))
    finally:
        pair.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_step_is_named(toy: Any, steps: Any, tmp_path: Path) -> None:
    with ranked(toy("qwen3"), tmp_path) as pair:
        pair.start()
        (pid,) = pids(pair)
        os.kill(pid, signal.SIGSTOP)  # so that rank 0 is in the middle of the step when it dies
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(TrainingError, match=rf"rank 1 \(process {pid}\), told to `step`, was killed by signal 9"):
            pair.step(steps[0], 0)
        with pytest.raises(TrainingError, match="was killed by signal 9"):
            pair.step(steps[0], 0)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_at_the_deadline(toy: Any, steps: Any, tmp_path: Path) -> None:
    with ranked(toy("qwen3"), tmp_path, rank_deadline_s=4) as pair:
        pair.start()
        (pid,) = pids(pair)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=rf"rank 0 waited 4 s for rank 1 \(process {pid}\), told to `step`"):
            pair.step(steps[0], 0)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_a_rank_that_waits_in_the_rendezvous_ends_with_rank_0(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = DistributedTrainer(plan_of(ranks=2, rank_deadline_s=600), toy("qwen3"), None, CPU, tmp_path)

    def killed() -> None:
        (tmp_path / "pid").write_text(str(pids(trainer)[0]))
        time.sleep(2.0)  # rank 1 is told to join, and waits for rank 0
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(trainer, "_join", killed)
    rank_0 = multiprocessing.get_context("fork").Process(target=trainer.start)
    rank_0.start()
    rank_0.join()
    assert rank_0.exitcode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    for _ in range(600):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("rank 1 outlives rank 0")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_end_of_its_log_says_why_a_rank_failed(toy: Any, tmp_path: Path) -> None:
    plugin = tmp_path / "elsewhere.py"
    plugin.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('no such scanner')\n")
    plan = replace(plan_of(ranks=2), plugins=(plugin,))
    said = r"(?s)rank 1 .*`start`, failed: ConfigError.*The end of .*rank-1.log:.*no such scanner"
    pair = DistributedTrainer(plan, toy("qwen3"), None, CPU, tmp_path)
    try:
        with pytest.raises(TrainingError, match=said):
            pair.start()
    finally:
        pair.close()
