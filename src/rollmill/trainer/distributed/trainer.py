"""A trainer that shares its work with other processes: rank 0 is here, the others follow its commands."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollmill.errors import ConfigError, RollmillError
from rollmill.models.load import PolicyModel
from rollmill.trainer.distributed.fsdp import gather_weights
from rollmill.trainer.distributed.rank_handle import ProcessRankLauncher, RankHandle, RankLauncher
from rollmill.trainer.distributed.ranks import (
    GroupRendezvous,
    RankGroup,
    is_process_group_error,
    join_group,
    leave_group,
)
from rollmill.trainer.distributed.spec import RankSetup, TrainerSpec, broadcast_weights, strip_weights
from rollmill.trainer.distributed.tensor_parallel import tensor_parallel_plan
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience

RANK_LOG_FOLDER = "ranks"
"""Folder of a run directory."""
_START_S = 180.0
"""Longest wait for fresh processes to import torch."""
_GRACE_S = 5.0
"""After an operation among ranks has failed: how long each may take to say what it was."""


class DistributedTrainer:
    """Has the surface of `Trainer`, and the same results. Without shards `model` itself is trained; with shards a copy
    of it is, and `model` gets the whole weights after each step.

    Processes start with `start`, or with the first command. Every method raises TrainingError where a rank failed,
    TrainerRankLostError where one ended, and that or DeadlineError where one does not answer; all name it.

    Args:
        run_dir: where the other ranks say what they do, and what child processes print is kept.
        crew: how the other ranks are started; default: as child processes.
    """

    def __init__(
        self,
        plan: TrainerSpec,
        model: Any,
        teacher: nn.Module | None,
        device: torch.device,
        run_dir: Path,
        crew: RankLauncher | None = None,
    ) -> None:
        self._plan, self._model, self._teacher = plan, model, teacher
        self._device, self._run_dir = device, run_dir
        self._size, self._sharded = plan.config.ranks, plan.config.sharding != "none"
        self._crew = crew or ProcessRankLauncher(run_dir / RANK_LOG_FOLDER)
        self._others: list[RankHandle] = []
        self._meeting: GroupRendezvous | None = None
        self._own: Trainer | RewardTrainer | None = None
        self._healthy = False  #: the last command was done

    @property
    def own(self) -> Trainer | RewardTrainer:
        """This rank's trainer."""
        self.start()
        assert self._own is not None
        return self._own

    def start(self) -> None:
        """Start the other ranks and give them the weights, unless that was done."""
        if self._own is not None:
            return
        self._check()
        self._meeting, threads = self._crew.open(), torch.get_num_threads()
        self._others = [self._crew.start(rank, threads) for rank in range(1, self._size)]
        beginning = RankSetup(
            self._plan.to_serialized(),
            strip_weights(self._model),
            None if self._teacher is None else strip_weights(self._teacher),
            self._device.type,
            threads,
            self._run_dir,
            self._meeting,
        )
        with self._crew.handed("beginning", beginning) as handed:
            for other in self._others:
                other.tell("start", handed, other.rank)
            for other in self._others:
                other.answer("start", _START_S)
        with self._together("join"):
            self._own = self._joined()

    def ahead(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """See Trainer. Passes that were begun are all made, even if nobody asks for the rest: every rank makes them."""
        own = self.own
        if not isinstance(own, Trainer) or not own.needs_precompute:
            return
        with self._crew.handed("batch", list(experiences)) as batch, self._together("ahead", batch, version):
            passes = own.ahead(experiences, version)
            for _ in passes:
                try:
                    yield
                except GeneratorExit:
                    break
            for _ in passes:
                pass

    def probes(
        self, upcoming: Sequence[Sequence[Experience]], experiences: Sequence[Experience], version: int
    ) -> list[Experience]:
        """See Trainer; a reward model's compares nothing."""
        return self.own.probes(upcoming, experiences, version)

    def step(
        self, experiences: Sequence[Experience], version: int, probes: Sequence[Experience] = ()
    ) -> dict[str, float]:
        """See Trainer."""
        own = self.own
        with (
            self._crew.handed("batch", (list(experiences), list(probes))) as batch,
            self._together("step", batch, version),
        ):
            metrics = own.step(experiences, version, probes)
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
        with self._crew.handed("state", state) as handed, self._together("load_state_dict", handed):
            own.load_state_dict(state)

    def export(self, folder: Path, policy: PolicyModel) -> None:
        """See RewardTrainer."""
        self.own.export(folder, policy)

    def close(self) -> None:
        """End the other ranks."""
        for other in self._others:
            other.finish() if self._healthy else other.end()
        self._others = []
        if self._meeting is not None:
            leave_group()
            self._crew.close()
            self._meeting = None

    def _check(self) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "trainer.ranks starts processes of its own, but this one belongs to a process group of "
                "torch.distributed already; start the run without torchrun"
            )
        found = torch.cuda.device_count() if self._device.type == "cuda" else self._size
        if found < self._size and not self._crew.own_gpus:
            text = f"trainer.ranks: {self._size} need a GPU each, and torch finds {found}; lower it"
            raise ConfigError(f"{text}, or on Ray reserve GPUs for each by placement.trainer_gpus")
        if self._plan.config.sharding == "tensor":
            tensor_parallel_plan(self._model, self._size)

    def _joined(self) -> Trainer | RewardTrainer:
        assert self._meeting is not None
        join_group(self._meeting, 0, self._size, self._device, self._plan.config.rank_deadline_s)
        for model in (self._model, self._teacher):
            if model is not None:
                broadcast_weights(model)
        learns = copy.deepcopy(self._model) if self._sharded else self._model
        return self._plan.trainer(
            learns, self._teacher, self._device, RankGroup(0, self._size, self._plan.config.sharding)
        )

    @contextmanager
    def _together(self, command: str, *details: Any) -> Iterator[None]:
        """All ranks do a command, this one what is inside; at the end the others have done it, too."""
        self._healthy, deadline = False, self._plan.config.rank_deadline_s
        for other in self._others:
            other.tell(command, *details)
        try:
            yield
        except RuntimeError as error:
            if is_process_group_error(error):
                raise self._blamed(command, deadline) from error
            raise
        for other in self._others:
            other.answer(command, deadline)
        self._healthy = True

    def _blamed(self, command: str, deadline_s: float) -> RollmillError:
        """What was wrong, by what the ranks say. One that ended or failed explains why others are late or alone."""
        outcomes = [other.outcome(command, _GRACE_S) for other in self._others]
        for kind in ("ended", "failed", "late", "alone", "done"):
            for other, outcome in zip(self._others, outcomes, strict=True):
                if outcome.kind == kind:
                    return other.error(command, outcome, deadline_s)
        raise AssertionError("there are other ranks")
