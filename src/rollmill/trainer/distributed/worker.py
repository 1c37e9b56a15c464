"""A rank besides rank 0: builds the same trainer and follows rank 0's commands.

`main` is the program of a child process, which receives them through a pipe (`rank_handle.ProcessRankHandle`).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollmill.errors import is_out_of_memory
from rollmill.offload import Offloadable
from rollmill.offload.plan import StorageTier
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trainer.distributed.fsdp import gather_weights
from rollmill.trainer.distributed.rank_handle import CommandResult
from rollmill.trainer.distributed.ranks import RankGroup, is_process_group_error, join_group, leave_group
from rollmill.trainer.distributed.spec import RankSetup, allocate_weights, broadcast_weights
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience


class RankWorker:
    """One rank; its commands are methods."""

    def __init__(self) -> None:
        self._setup: RankSetup
        self._rank = 0
        self._trainer: Trainer | RewardTrainer
        self._heartbeat: HeartbeatWriter | None = None
        self._components: dict[str, Offloadable] = {}

    def where(self) -> str:
        """Process and host, for messages."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def run_command(self, command: str, *details: Any) -> CommandResult:
        """Runs a command of rank 0. Details are values, or files that hold them."""
        if self._heartbeat is not None:
            self._heartbeat.set_activity(command)
        try:
            getattr(self, command)(*(_read(each) if isinstance(each, Path) else each for each in details))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"
            self.ended(what)
            leave_group()  # others may wait for this rank, and an actor of Ray does not exit
            memory = is_out_of_memory(error)
            return CommandResult("alone" if is_process_group_error(error) and not memory else "failed", what, memory)
        if self._heartbeat is not None:
            self._heartbeat.set_activity("rest", "rank 0")
        return CommandResult("done")

    def start(self, setup: RankSetup, rank: int) -> None:
        """Prepares to join the others."""
        torch.set_num_threads(setup.threads)
        self._device = torch.device(setup.device)
        if self._device.type == "cuda":  # index 0 if it sees only its own GPU
            self._device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._setup, self._rank = setup, rank
        self._heartbeat = HeartbeatWriter(setup.run_dir, f"trainer rank {rank}")
        self._plan = setup.plan.received()
        self._policy = setup.policy
        if not self._plan.config.shards_weights:
            self._policy = allocate_weights(setup.policy, self._device)
        self._teacher = None if setup.teacher is None else allocate_weights(setup.teacher, self._device)

    def join(self) -> None:
        """Joins the others and receives the weights from rank 0, or this rank's part of them."""
        config = self._plan.config
        join_group(self._setup.rendezvous, self._rank, config.ranks, self._device, config.rank_deadline_s)
        for model in (None if config.shards_weights else self._policy, self._teacher):
            if model is not None:
                broadcast_weights(model)
        ranks = RankGroup(self._rank, config.ranks, config.sharding)
        self._trainer = self._plan.trainer(self._policy, self._teacher, self._device, ranks)

    def precompute(self, experiences: Sequence[Experience], version: int) -> None:
        """Runs the passes over a batch that need no rewards."""
        for _ in self._trainer.precompute(experiences, version):
            pass

    def step(self, batch: tuple[list[Experience], list[Experience]], version: int) -> None:
        """Learns from a batch, which comes with completions to compare."""
        experiences, compared = batch
        self._trainer.step(experiences, version, compared)

    def gather(self, dtype: torch.dtype | None) -> None:
        """Sends rank 0 this rank's parts of the weights."""
        for _ in gather_weights(self._trainer.model, dtype):
            pass

    def move(self, name: str, place: StorageTier, folder: str) -> None:
        """Moves this rank's copy of a component (section `offload`)."""
        assert isinstance(self._trainer, Trainer)
        if not self._components:
            self._components = {each.name: each for each in self._trainer.offloadable(Path(folder))}
        self._components[name].move(place)

    def set_learning_rate(self, lr: float) -> None:
        self._trainer.set_learning_rate(lr)

    def state_dict(self) -> None:
        """Sends rank 0 this rank's part of the trainer's state."""
        self._trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)

    def ended(self, how: str) -> None:
        """Writes the final status for `rollmill status`."""
        if self._heartbeat is not None:
            self._heartbeat.close(how)


def main() -> None:
    """Runs each command and sends its result; exits when rank 0 asks for it or is gone."""
    connection, folder, worker = Connection(int(sys.argv[1])), Path(sys.argv[2]), RankWorker()
    try:
        while (message := connection.recv())[0] != "close":
            outcome = worker.run_command(*message)
            connection.send(outcome)
            if outcome.kind != "done":
                break
        worker.ended("done")
    except (EOFError, OSError):
        worker.ended("rank 0 is gone")
        shutil.rmtree(folder, ignore_errors=True)  # rank 0 cannot remove it any more
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the seconds that the interpreter takes to tear down torch


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=False, map_location="cpu", mmap=True)
