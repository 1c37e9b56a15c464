"""A trainer that shares its work with other processes: rank 0 is here, the others follow its commands."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollmill.core.errors import ConfigError, RollmillError
from rollmill.core.types import Experience
from rollmill.trainer.build import Beginning, Plan, share_weights, skeleton
from rollmill.trainer.group import join_group, leave_group, of_group
from rollmill.trainer.rank_process import RankProcess
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import ScoreTrainer
from rollmill.trainer.sharding import gather_weights
from rollmill.trainer.tensor_parallel import styles_of
from rollmill.trainer.trainer import Trainer

LOGS = "ranks"
"""Folder of a run directory."""
_START_S = 180.0
"""Longest wait for fresh processes to import torch."""
_GRACE_S = 5.0
"""After an operation among ranks has failed: how long each may take to say what it was."""


class RankedTrainer:
    """Has the surface of `Trainer`, and the same results. Without shards `model` itself is trained; with shards a copy
    of it is, and `model` gets the whole weights after each step.

    Processes start with `start`, or with the first command. Every method raises TrainingError where a rank ended or
    failed and DeadlineError where one does not answer; both name it.

    Args:
        run_dir: where the other ranks say what they do, and what they print is kept.
    """

    def __init__(self, plan: Plan, model: Any, teacher: nn.Module | None, device: torch.device, run_dir: Path) -> None:
        self._plan, self._model, self._teacher = plan, model, teacher
        self._device, self._run_dir = device, run_dir
        self._size, self._sharded = plan.config.ranks, plan.config.sharding != "none"
        self._processes: list[RankProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._own: Trainer | ScoreTrainer | None = None
        self._healthy = False  #: the last command was done

    @property
    def own(self) -> Trainer | ScoreTrainer:
        """This rank's trainer."""
        self.start()
        assert self._own is not None
        return self._own

    def start(self) -> None:
        """Start the other ranks and give them the weights, unless that was done."""
        if self._own is not None:
            return
        self._check()
        self._folder = tempfile.TemporaryDirectory(prefix="rollmill-ranks-")
        threads = torch.get_num_threads()
        logs = {rank: self._run_dir / LOGS / f"rank-{rank}.log" for rank in range(1, self._size)}
        self._processes = [RankProcess(rank, log, threads) for rank, log in logs.items()]
        beginning = Beginning(
            self._plan.to_sent(),
            skeleton(self._model),
            None if self._teacher is None else skeleton(self._teacher),
            self._device.type,
            threads,
            self._run_dir,
        )
        file = self._written("beginning", beginning)
        for process in self._processes:
            process.tell("start", file, process.rank, self._size)
        for process in self._processes:
            process.answer("start", _START_S)
        file.unlink()
        with self._together("join"):
            self._own = self._joined()

    def ahead(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """See Trainer. Passes that were begun are all made, even if nobody asks for the rest: every rank makes them."""
        own = self.own
        if not isinstance(own, Trainer) or not own.infers:
            return
        with self._together("ahead", self._written("batch", list(experiences)), version):
            passes = own.ahead(experiences, version)
            for _ in passes:
                try:
                    yield
                except GeneratorExit:
                    break
            for _ in passes:
                pass

    def step(self, experiences: Sequence[Experience], version: int) -> dict[str, float]:
        """See Trainer."""
        own = self.own
        with self._together("step", self._written("batch", list(experiences)), version):
            metrics = own.step(experiences, version)
            if self._sharded and isinstance(own, Trainer):
                gather_weights(own.model, self._model)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """See Trainer: the same whatever the number of ranks."""
        own = self.own
        if not self._sharded:
            return own.state_dict()
        with self._together("state_dict"):
            return own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Trainer."""
        own = self.own
        with self._together("load_state_dict", self._written("state", state)):
            own.load_state_dict(state)

    def close(self) -> None:
        """End the other ranks."""
        for process in self._processes:
            process.finish() if self._healthy else process.end()
        self._processes = []
        if self._folder is not None:
            leave_group()
            self._folder.cleanup()
            self._folder = None

    def _check(self) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "trainer.ranks starts processes of its own, but this one belongs to a process group of "
                "torch.distributed already; start the run without torchrun"
            )
        if self._device.type == "cuda" and torch.cuda.device_count() < self._size:
            found = torch.cuda.device_count()
            raise ConfigError(f"trainer.ranks: {self._size} need a GPU each, and torch finds {found}; lower it")
        if self._plan.config.sharding == "tensor":
            styles_of(self._model, self._size)

    def _joined(self) -> Trainer | ScoreTrainer:
        assert self._folder is not None
        join_group(Path(self._folder.name), 0, self._size, self._device, self._plan.config.rank_deadline_s)
        for model in (self._model, self._teacher):
            if model is not None:
                share_weights(model)
        learns = copy.deepcopy(self._model) if self._sharded else self._model
        return self._plan.trainer(learns, self._teacher, self._device, Ranks(0, self._size, self._plan.config.sharding))

    @contextmanager
    def _together(self, command: str, *details: Any) -> Iterator[None]:
        """All ranks do a command, this one what is inside; at the end the others have done it, too, and files that were
        written for them are gone."""
        self._healthy, deadline = False, self._plan.config.rank_deadline_s
        for process in self._processes:
            process.tell(command, *details)
        try:
            yield
        except RuntimeError as error:
            if of_group(error):
                raise self._blamed(command, deadline) from error
            raise
        for process in self._processes:
            process.answer(command, deadline)
        for file in details:
            if isinstance(file, Path):
                file.unlink()  # who has it in memory keeps it
        self._healthy = True

    def _blamed(self, command: str, deadline_s: float) -> RollmillError:
        """What was wrong, by what the ranks say. One that ended or failed explains why others are late or alone."""
        outcomes = [process.outcome(command, _GRACE_S) for process in self._processes]
        for kind in ("ended", "failed", "late", "alone", "done"):
            for process, outcome in zip(self._processes, outcomes, strict=True):
                if outcome.kind == kind:
                    return process.error(command, outcome, deadline_s)
        raise AssertionError("there are other ranks")

    def _written(self, name: str, value: Any) -> Path:
        """A file with what all ranks read."""
        assert self._folder is not None
        file = Path(self._folder.name) / name
        torch.save(value, file)
        return file
