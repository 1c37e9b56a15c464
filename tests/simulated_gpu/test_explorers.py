"""Explorers of the trainer's host take its weights from GPU to GPU, whatever becomes of one of them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import metrics, tiny_run
from support.toys import toy_checkpoint
from torch import Tensor

import rollmill
from rollmill.config.model import ModelConfig
from rollmill.config.placement import ExplorerSpec
from rollmill.config.run import StageConfig
from rollmill.models.load import load_policy
from rollmill.remote.stage_worker import StageWorker, WorkerSetup, trainable_parameters
from rollmill.weights import FolderSender, buckets
from rollmill.weights.cuda_ipc import IPCReader, IPCSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SMALL = 1 << 14
GAP = 1e-4  # of log-probs in fp32
STAGE = StageConfig.model_validate({"rewards": [{"name": "format", "pattern": "."}]})
CUDA = torch.device("cuda", 0)


def parameters(checkpoint: Path, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    policy = load_policy(ModelConfig(path=checkpoint), texts=(), seed=0, device=device)
    return policy, trainable_parameters(policy)


def of_version(first: dict[str, Tensor], version: int) -> dict[str, Tensor]:
    return {name: each + version for name, each in first.items()}


def explores(folder: Path, name: str, commands: Connection, habit: str) -> None:
    """A process with an explorer that updates when it is told of a version, and says whether it has it, and how."""
    policy, current = parameters(folder / "model", CUDA)
    first = {name: each.clone() for name, each in current.items()}
    tensors = IPCReader.tensors

    def dies(reader: IPCReader) -> Iterator[tuple[str, Tensor]]:
        for number, found in enumerate(tensors(reader)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield found

    if habit == "dies":
        IPCReader.tensors = dies  # type: ignore[method-assign]
    if habit == "maps nothing":
        torch.UntypedStorage._new_shared_cuda = None  # type: ignore[assignment, method-assign]
    setup = WorkerSetup(
        STAGE.model_dump_json(), policy, "fp32", 1, [], [], "folder", str(folder / "w"), ipc=folder / "w", name=name
    )

    async def serve() -> None:
        worker = StageWorker(setup, ExplorerSpec())
        commands.send(worker._takes_ipc)
        while (version := await asyncio.to_thread(commands.recv)) is not None:
            await worker.update(version)
            right = all(torch.equal(current[name], each) for name, each in of_version(first, worker._version).items())
            commands.send((worker._version, right, dict(worker._ipc_counts)))
        await worker.close()

    asyncio.run(serve())


class Explorer:
    """Such a process, seen from here."""

    def __init__(self, folder: Path, name: str, habit: str = "") -> None:
        self.pipe, theirs = mp.get_context("spawn").Pipe()
        self.process = mp.get_context("spawn").Process(target=explores, args=(folder, name, theirs, habit), daemon=True)
        self.process.start()
        theirs.close()

    def got(self) -> Any:
        assert self.pipe.poll(90), "it hangs"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(20)
        assert self.process.exitcode == 0


class Trainer:
    """The sender of a trainer, which tells explorers of versions."""

    def __init__(self, folder: Path) -> None:
        self.first = parameters(toy_checkpoint(folder / "model", "qwen3"), CUDA)[1]
        self.sender = FolderSender(folder / "w", self.first)
        self.ipc = IPCSender(folder / "w", CUDA, join_s=3.0, bucket_s=3.0)

    def publish(self, version: int, *told: Explorer) -> None:
        sent = of_version(self.first, version)
        assert self.ipc.offer(version, sent, [f"explorer {number}" for number in range(len(told))])
        for each in told:
            each.pipe.send(version)
        self.sender.send(version, sent, self.ipc)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    made = Trainer(tmp_path)
    yield made
    made.ipc.close()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("w.")] == []


def test_explorers_take_versions_by_ipc_and_one_that_dies_or_stops_holds_up_nobody(
    tmp_path: Path, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    explorers = [Explorer(tmp_path, f"explorer {number}", "dies" if number == 2 else "") for number in range(3)]
    staying = explorers[:2]
    assert [each.got() for each in explorers] == [True] * 3
    trainer.publish(1, *explorers)
    assert [each.got() for each in staying] == [(1, True, {"explorer/ipc_updates": 1})] * 2
    explorers[2].process.join(20)
    assert explorers[2].process.exitcode == -signal.SIGKILL
    assert "explorer 2 stopped reading weights by CUDA IPC" in caplog.text

    staying[1].signal(signal.SIGSTOP)
    trainer.publish(2, *staying)
    assert trainer.ipc.missed == {"explorer 1"}
    assert "explorer 1 did not come for weights by CUDA IPC within 3 s" in caplog.text
    assert staying[0].got() == (2, True, {"explorer/ipc_updates": 2})
    staying[1].signal(signal.SIGCONT)
    assert staying[1].got() == (2, True, {"explorer/ipc_updates": 1})
    for each in staying:
        each.end()


def test_an_explorer_that_cannot_map_the_memory_takes_the_version_from_the_folder(
    tmp_path: Path, trainer: Trainer
) -> None:
    explorer = Explorer(tmp_path, "explorer 0", "maps nothing")
    assert explorer.got() is True
    for version in (1, 2):
        trainer.publish(version, explorer)
        assert explorer.got() == (version, True, {"explorer/ipc_fallbacks": version})
    assert trainer.ipc.missed == set()
    explorer.end()


@pytest.mark.thorough
def test_a_run_s_explorer_takes_the_weights_of_each_step_by_ipc(tmp_path: Path) -> None:
    path = tiny_run(
        tmp_path,
        stages=None,
        algorithm={"name": "grpo"},
        steps=4,
        max_staleness=1,
        trainer={"precision": "fp32", "lr": 1e-3},
        evaluation=None,
        mode="train",
    )
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rollmill", "run", str(path), "--out", str(out), "--set", "mode=explore"]
    with subprocess.Popen(command) as explorer:
        try:
            rollmill.run(path, out=out)
            assert explorer.wait(60) == 0
        finally:
            explorer.kill()
    updates = [each for each in metrics(out) if "grad_norm" in each]
    assert [each["step"] for each in updates] == [1, 2, 3, 4]
    assert sum(each.get("explorer/ipc_updates", 0.0) for each in updates) >= 2
    assert not any(each.get("explorer/ipc_fallbacks") for each in updates)
    assert max(each["logprob_gap/mean"] for each in updates if "logprob_gap/mean" in each) < GAP
