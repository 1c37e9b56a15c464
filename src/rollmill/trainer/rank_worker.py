"""The program of a rank besides the first: it makes the same trainer and follows the first rank's commands."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollmill.monitor.heartbeat import Heartbeat
from rollmill.trainer.build import Beginning, share_weights, with_memory
from rollmill.trainer.group import join_group, of_group
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import ScoreTrainer
from rollmill.trainer.sharding import gather_weights
from rollmill.trainer.trainer import Trainer


class Worker:
    """One rank. Its methods are the commands."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._rank, self._size = 0, 1
        self._learner: Trainer | ScoreTrainer
        self._beat: Heartbeat | None = None

    def start(self, file: Path, rank: int, size: int) -> None:
        """Read what it begins with; the ranks meet in the folder of that file."""
        beginning: Beginning = torch.load(file, weights_only=False)
        torch.set_num_threads(beginning.threads)
        self._device = torch.device(beginning.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", rank)
            torch.cuda.set_device(self._device)
        self._file, self._rank, self._size = file, rank, size
        self._beat = Heartbeat(beginning.run_dir, f"trainer rank {rank}")
        self._plan = beginning.plan.received()
        self._policy = with_memory(beginning.policy, self._device)
        self._teacher = None if beginning.teacher is None else with_memory(beginning.teacher, self._device)

    def join(self) -> None:
        """Join the others and take the weights from rank 0."""
        assert self._file is not None
        deadline = self._plan.config.rank_deadline_s
        join_group(self._file.parent, self._rank, self._size, self._device, deadline)
        for model in (self._policy, self._teacher):
            if model is not None:
                share_weights(model)
        ranks = Ranks(self._rank, self._size, self._plan.config.sharding)
        self._learner = self._plan.trainer(self._policy, self._teacher, self._device, ranks)

    def ahead(self, file: Path, version: int) -> None:
        """Make the passes over the batch in a file that need no rewards."""
        assert isinstance(self._learner, Trainer)
        for _ in self._learner.ahead(_read(file), version):
            pass

    def step(self, file: Path, version: int) -> None:
        """Learn from the batch in a file, and give rank 0 its part of the weights."""
        self._learner.step(_read(file), version)
        if isinstance(self._learner, Trainer):
            gather_weights(self._learner.model, None)

    def state_dict(self) -> None:
        """Give rank 0 its part of the trainer's state."""
        self._learner.state_dict()

    def load_state_dict(self, file: Path) -> None:
        """Go on from the state in a file."""
        self._learner.load_state_dict(_read(file))

    def says(self, doing: str, waits_for: str = "") -> None:
        """What this process does, for `rollmill status`."""
        if self._beat is not None:
            self._beat.says(doing, waits_for)

    def ended(self, how: str) -> None:
        """The last that it says."""
        if self._beat is not None:
            self._beat.close(how)

    def tidy(self) -> None:
        """Remove the files that rank 0 is no more there to remove."""
        if self._file is not None:
            shutil.rmtree(self._file.parent, ignore_errors=True)


def main() -> None:
    """Answer each command with what came of it; end where rank 0 says so, or is gone."""
    connection, worker = Connection(int(sys.argv[1])), Worker()
    try:
        while (message := connection.recv())[0] != "close":
            worker.says(message[0])
            try:
                getattr(worker, message[0])(*message[1:])
            except Exception as error:
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}"
                worker.ended(what)
                connection.send(("alone" if of_group(error) else "failed", what))
                break
            worker.says("rest", "rank 0")
            connection.send(("done", ""))
        worker.ended("done")
    except (EOFError, OSError):
        worker.ended("rank 0 is gone")
        worker.tidy()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and the interpreter takes seconds to take torch apart


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=False, map_location="cpu", mmap=True)


if __name__ == "__main__":
    main()
