"""A rank besides the first: it makes the same trainer and follows the first rank's commands. Run as a program it is a
child process, which gets them by a pipe."""

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

from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trainer.distributed.fsdp import gather_weights
from rollmill.trainer.distributed.rank_handle import CommandResult
from rollmill.trainer.distributed.ranks import RankGroup, is_process_group_error, join_group
from rollmill.trainer.distributed.spec import RankSetup, allocate_weights, broadcast_weights
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience


class RankWorker:
    """One rank. What it is told to do is a method."""

    def __init__(self) -> None:
        self._begun: RankSetup
        self._rank = 0
        self._learner: Trainer | RewardTrainer
        self._beat: HeartbeatWriter | None = None

    def where(self) -> str:
        """Its process, for messages."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def run_command(self, command: str, *details: Any) -> CommandResult:
        """Do what the first rank says. Details are values, or files that hold them."""
        if self._beat is not None:
            self._beat.set_activity(command)
        try:
            getattr(self, command)(*(_read(each) if isinstance(each, Path) else each for each in details))
        except Exception as error:
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"
            self.ended(what)
            return CommandResult("alone" if is_process_group_error(error) else "failed", what)
        if self._beat is not None:
            self._beat.set_activity("rest", "rank 0")
        return CommandResult("done")

    def start(self, beginning: RankSetup, rank: int) -> None:
        """Get ready to join the others."""
        torch.set_num_threads(beginning.threads)
        self._device = torch.device(beginning.device)
        if self._device.type == "cuda":  # the first where it sees its own only
            self._device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._begun, self._rank = beginning, rank
        self._beat = HeartbeatWriter(beginning.run_dir, f"trainer rank {rank}")
        self._plan = beginning.plan.received()
        self._policy = allocate_weights(beginning.policy, self._device)
        self._teacher = None if beginning.teacher is None else allocate_weights(beginning.teacher, self._device)

    def join(self) -> None:
        """Join the others and take the weights from rank 0."""
        config = self._plan.config
        join_group(self._begun.rendezvous, self._rank, config.ranks, self._device, config.rank_deadline_s)
        for model in (self._policy, self._teacher):
            if model is not None:
                broadcast_weights(model)
        ranks = RankGroup(self._rank, config.ranks, config.sharding)
        self._learner = self._plan.trainer(self._policy, self._teacher, self._device, ranks)

    def ahead(self, experiences: Sequence[Experience], version: int) -> None:
        """Make the passes over a batch that need no rewards."""
        for _ in self._learner.ahead(experiences, version):
            pass

    def step(self, batch: tuple[list[Experience], list[Experience]], version: int) -> None:
        """Learn from a batch, which comes with its probes, and give rank 0 its part of the weights."""
        experiences, probes = batch
        self._learner.step(experiences, version, probes)
        if isinstance(self._learner, Trainer):
            gather_weights(self._learner.model, None)

    def state_dict(self) -> None:
        """Give rank 0 its part of the trainer's state."""
        self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._learner.load_state_dict(state)

    def ended(self, how: str) -> None:
        """The last that it says, for `rollmill status`."""
        if self._beat is not None:
            self._beat.close(how)


def main() -> None:
    """Answer each command with what came of it; end where rank 0 says so, or is gone."""
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
        shutil.rmtree(folder, ignore_errors=True)  # rank 0 is no more there to remove it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and the interpreter takes seconds to take torch apart


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=False, map_location="cpu", mmap=True)


if __name__ == "__main__":
    main()
