"""Weights that leave one GPU and arrive on another: bit by bit, whatever becomes of a reader."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.engines.vllm.extension import SharedWeightsExtension
from rollmill.weights import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    broadcast_group,
    buckets,
)
from rollmill.weights.buckets import load_tensors, pack_block
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import BlockLayout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SMALL = 1 << 14
HERE, SIMULATED = "127.0.0.1", os.environ.get("SIMULATED_CUDA") == "1"
SPAWN = mp.get_context("spawn")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", SMALL)


def weights(version: int, device: str = "cuda") -> dict[str, Tensor]:
    """All of a version: some tensors that share a bucket, and one larger than a bucket."""
    source = torch.Generator().manual_seed(version)
    shapes = {"a": (3, 5), "b": (7,), "large": (97, 101), "c": (4000,), "d": (3000,), "e": (1,)}
    made = {name: torch.randn(shape, generator=source).to(device) for name, shape in shapes.items()}
    return made | {"n": torch.tensor([version], device=device), "t": made["large"].t()}


def in_bf16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}


def equal(found: dict[str, Tensor], version: int) -> bool:
    """Whether they are what arrives of a version."""
    expected = in_bf16(weights(version, "cpu"))
    return found.keys() == expected.keys() and all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


def test_a_block_packed_from_a_gpu_is_that_of_the_host() -> None:
    layout = BlockLayout.of(weights(0), torch.bfloat16)
    here, there = (torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2))
    expected = pack_block(weights(3, "cpu"), layout, here)
    assert pack_block(weights(3), layout, there) == expected
    assert torch.equal(here, there)
    into = {name: torch.empty_like(each) for name, each in weights(0).items()}
    load_tensors(layout, there, into)
    assert equal(in_bf16(into), 3)


@pytest.mark.usefixtures("simulated")
def test_buckets_cross_in_one_transfer_each_for_which_the_gpu_does_not_wait() -> None:
    from support.simulated_cuda.trace import Trace

    sent = weights(0)
    layout = BlockLayout.of(sent, torch.bfloat16)
    block = torch.zeros(layout.size, dtype=torch.uint8)
    into = {name: torch.empty_like(each) for name, each in sent.items()}
    count = len(layout.buckets(SMALL))
    assert 1 < count < len(sent)
    with Trace() as trace:
        pack_block(sent, layout, block)
    crossed = {kind: 0 for kind, _ in trace.crossings}
    for (kind, _), number in trace.crossings.items():
        crossed[kind] += number
    assert crossed == {"d2h async": count, "event.synchronize": count}
    with Trace() as trace:
        load_tensors(layout, block, into)
    kinds = {kind for kind, _ in trace.crossings}
    assert "h2d pageable" not in kinds
    assert sum(number for (kind, _), number in trace.crossings.items() if kind == "h2d pinned") == count


class Engine(SharedWeightsExtension):
    """A process of vLLM, with a model that keeps what it is given."""

    def __init__(self, habit: str) -> None:
        self.found: dict[str, Tensor] = {}
        self.parallel_config = SimpleNamespace(world_size=1)
        self.model_runner = SimpleNamespace(
            device=torch.device("cuda", 0), model=torch.nn.Module(), reload_weights=self._reload
        )
        self._habit = habit

    def _reload(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.found = {}
        for number, (name, weight) in enumerate(weights_iterator):
            if self._habit == "dies between" and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            self.found[name] = weight


def loads(path: Path, commands: Connection, habit: str) -> None:
    """A process that loads a version when it is told of it, and says how it came, and whether it is right."""
    for name in ("", ".model_executor", ".model_executor.layers"):
        sys.modules[f"vllm{name}"] = ModuleType(f"vllm{name}")
    for name, part in (
        ("utils", "dispatch_cpu_unquantized_gemm"),
        ("vocab_parallel_embedding", "VocabParallelEmbedding"),
    ):
        sys.modules[f"vllm.model_executor.layers.{name}"] = module = ModuleType(name)
        setattr(module, part, torch.nn.Embedding)
    if habit == "maps nothing":
        torch.UntypedStorage._new_shared_cuda = None  # type: ignore[assignment, method-assign]
    engine = Engine(habit)
    commands.send("ready")
    while (version := commands.recv()) is not None:
        loaded, how = engine.load_shared_weights(str(path), {}, version)
        commands.send((loaded, how, equal(engine.found, loaded)))


class Process:
    """Such a process, seen from here; it sees one GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, *arguments: Any, gpu: int) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(gpu))
        self.process = SPAWN.Process(target=target, args=(*arguments[:1], theirs, *arguments[1:]), daemon=True)
        self.process.start()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        theirs.close()

    def got(self) -> Any:
        assert self.pipe.poll(60), "it hangs"
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(20)


class Sender:
    """Tells an engine of a version, and sends it."""

    def __init__(self, path: Path) -> None:
        self.sender = SharedMemorySender(path, weights(0), dtype=torch.bfloat16)
        self.ipc = IPCSender(path, torch.device("cuda", 0))

    def publish(self, version: int, engine: Process) -> None:
        assert self.ipc.offer(version, weights(version), ["vLLM"])
        engine.pipe.send(version)
        self.sender.send(version, weights(version), self.ipc)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    made = Sender(tmp_path / "w")
    yield made
    made.sender.close()
    made.ipc.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_takes_versions_by_ipc(tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Process(monkeypatch, loads, tmp_path / "w", "", gpu=0)
    assert engine.got() == "ready"
    for version in (1, 2, 3):
        sender.publish(version, engine)
        assert engine.got() == (version, "ipc", True)
    engine.end()
    assert engine.process.exitcode == 0


@pytest.mark.parametrize(
    ("habit", "gpu", "why"),
    [
        pytest.param(
            "",
            1,
            "it does not see the trainer's GPU",
            marks=pytest.mark.skipif(not SIMULATED, reason="needs a second GPU"),
        ),
        ("maps nothing", 0, "the trainer's memory cannot be mapped"),
    ],
)
def test_who_cannot_map_the_memory_says_why_and_reads_the_host_s(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch, habit: str, gpu: int, why: str
) -> None:
    engine = Process(monkeypatch, loads, tmp_path / "w", habit, gpu=gpu)
    assert engine.got() == "ready"
    for version in (1, 2):
        sender.publish(version, engine)
        loaded, how, right = engine.got()
        assert (loaded, right) == (version, True)
        assert why in how
    engine.end()


def test_who_is_killed_amid_a_version_leaves_it_to_the_next(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = Process(monkeypatch, loads, tmp_path / "w", "dies between", gpu=0)
    assert dying.got() == "ready"
    sender.publish(1, dying)
    dying.process.join(20)
    assert dying.process.exitcode == -signal.SIGKILL
    late = Process(monkeypatch, loads, tmp_path / "w", "", gpu=0)
    assert late.got() == "ready"
    receiver = SharedMemoryReceiver(tmp_path / "w")
    into = {name: torch.empty_like(each) for name, each in in_bf16(weights(0, "cpu")).items()}
    assert receiver.receive(into) == 1
    assert equal(into, 1)
    receiver.close()
    sender.publish(2, late)
    assert late.got() == (2, "ipc", True)
    late.end()


def receives(address: str, commands: Connection, habit: str) -> None:
    """A process that receives a version when it is told to, and says whether it is right."""
    broadcast_group.BUCKET_BYTES = buckets.BUCKET_BYTES = SMALL
    receiver = BroadcastReceiver(address, device=torch.device("cuda"), transfer_s=5.0)
    finish, arrived = broadcast_group.BroadcastGroup._finish, 0

    def dies_between(self: Any, work: Any) -> None:
        nonlocal arrived
        finish(self, work)
        arrived += 1
        if habit == "dies between" and arrived == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    broadcast_group.BroadcastGroup._finish = dies_between  # type: ignore[method-assign]
    commands.send("ready")
    while commands.recv() is not None:
        into = {name: torch.empty_like(each) for name, each in weights(0).items()}
        version = receiver.receive(into)
        by_nccl = receiver._group is not None and receiver._group._device is not None
        commands.send((version, by_nccl, equal(in_bf16(into), version)))
    receiver.close()


@pytest.mark.usefixtures("simulated")
def test_nccl_sends_buckets_to_all_but_those_that_die(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = BroadcastSender(
        HERE, "name", weights(0), dtype=torch.bfloat16, device=torch.device("cuda", 0), window_s=5.0, deadline_s=5.0
    )
    readers = [Process(monkeypatch, receives, sender.address, "", gpu=gpu) for gpu in (1, 2)]
    dying = Process(monkeypatch, receives, sender.address, "dies between", gpu=3)
    for each in (*readers, dying):
        assert each.got() == "ready"
    sender.send(1, weights(1))
    for each in (*readers, dying):
        each.pipe.send("")
    assert [each.got() for each in readers] == [(1, True, True)] * 2
    dying.process.join(20)
    assert dying.process.exitcode == -signal.SIGKILL
    late = Process(monkeypatch, receives, sender.address, "", gpu=3)
    assert late.got() == "ready"
    late.pipe.send("")
    assert late.got() == (1, True, True)
    sender.send(2, weights(2))
    for each in (*readers, late):
        each.pipe.send("")
    assert [each.got() for each in (*readers, late)] == [(2, True, True)] * 3
    for each in (*readers, late):
        each.end()
    sender.close()
