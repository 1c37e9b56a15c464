"""A trainer on several ranks: rank 0 runs in this process, the others follow its commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn

from rollmill.errors import ConfigError, RollmillError
from rollmill.models.load import PolicyModel
from rollmill.models.storage import copy_to_file, is_stored, read_stored, take_copy
from rollmill.offload import Offloadable
from rollmill.offload.plan import StorageTier
from rollmill.trainer.distributed.context_parallel import check_context_parallel
from rollmill.trainer.distributed.expert_parallel import check_expert_parallel
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
from rollmill.weights.buckets import ShardedWeights, copy_whole

RANK_LOG_FOLDER = "ranks"
"""Subfolder of the run directory."""
_START_S = 180.0
"""Timeout for new processes to import torch."""
_GRACE_S = 5.0
"""Time each rank gets to report its error after a collective has failed."""


class RankedComponent:
    """A component of which every rank has a copy: weights without shards, or an optimizer's state.

    Args:
        folder: of files; other ranks make their own there.
    """

    def __init__(self, own: Offloadable, trainer: DistributedTrainer, folder: Path) -> None:
        self.name, self._own, self._trainer, self._folder = own.name, own, trainer, folder
        self._place: StorageTier = "device"

    def bytes(self) -> int:
        """Bytes of this rank's copy."""
        return self._own.bytes()

    def move(self, place: StorageTier) -> int:
        """Move the copies of all ranks. Raises OffloadError if there is no room on one."""
        if place == self._place:
            return 0
        moved = self._trainer.move(self._own, place, self._folder)
        self._place = place
        return moved

    def copies(self) -> Mapping[int, UntypedStorage]:
        return self._own.copies()

    def close(self) -> None:
        """Free this rank's copy; those of other ranks vanish with their processes."""
        self._own.close()


class DistributedTrainer:
    """Has the interface and the results of `Trainer`, on several ranks.

    Without shards `model` itself is trained. With shards a copy of it is, which leaves its files or host memory part by
    part for the ranks' devices; `model` gets whole weights by `gather_policy`, and files by `sharded_weights`.

    Processes start with `start`, or with the first command. Every method raises TrainingError if a rank failed,
    TrainerRankLostError if one ended, and that or DeadlineError if one does not answer; all name the rank.

    Args:
        run_dir: run directory, for the heartbeats of the other ranks and the output of child processes.
        launcher: starts the other ranks; default: as child processes.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: Any,
        teacher: nn.Module | None,
        device: torch.device,
        run_dir: Path,
        launcher: RankLauncher | None = None,
    ) -> None:
        self._spec, self._model, self._teacher = spec, model, teacher
        self._device, self._run_dir = device, run_dir
        self._size, self._sharded = spec.config.ranks, spec.config.shards_weights
        self._launcher = launcher or ProcessRankLauncher(run_dir / RANK_LOG_FOLDER)
        self._others: list[RankHandle] = []
        self._rendezvous: GroupRendezvous | None = None
        self._own: Trainer | RewardTrainer | None = None
        self._healthy, self._keeps_policy = False, True  #: the last command was done; see `start`
        self._is_current = not is_stored(model)  #: `model` has the weights of the last step
        if self._sharded:
            model.to("cpu")

    @property
    def own(self) -> Trainer | RewardTrainer:
        """This rank's trainer."""
        self.start()
        assert self._own is not None
        return self._own

    def start(self, *, keeps_policy: bool = True) -> None:
        """Starts the other ranks and sends them the weights; no-op if already started.

        Args:
            keeps_policy: with shards, `model` keeps its memory: an engine computes with it. Else it has memory only
                from `gather_policy` until the next step.
        """
        if self._own is not None:
            return
        self._keeps_policy = keeps_policy
        self._check()
        self._rendezvous, threads = self._launcher.open(), torch.get_num_threads()
        self._others = [self._launcher.start(rank, threads) for rank in range(1, self._size)]
        setup = RankSetup(
            self._spec.to_serialized(),
            strip_weights(self._model),
            None if self._teacher is None else strip_weights(self._teacher),
            self._device.type,
            threads,
            self._run_dir,
            self._rendezvous,
        )
        with self._launcher.handed("beginning", setup) as handed:
            for other in self._others:
                other.send("start", handed, other.rank)
            for other in self._others:
                other.wait("start", _START_S)
        with self._on_all_ranks("join"):
            self._own = self._join()
        self._free_policy()

    def precompute(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """Once started, all passes run even if the caller stops early, since every rank makes them."""
        own = self.own
        if not isinstance(own, Trainer) or not own.needs_precompute:
            return
        with (
            self._launcher.handed("batch", list(experiences)) as batch,
            self._on_all_ranks("precompute", batch, version),
        ):
            passes = own.precompute(experiences, version)
            for _ in passes:
                try:
                    yield
                except GeneratorExit:
                    break
            for _ in passes:
                pass

    def set_learning_rate(self, lr: float) -> None:
        own = self.own
        with self._on_all_ranks("set_learning_rate", lr):
            own.set_learning_rate(lr)

    def to_compare(
        self, upcoming: Sequence[Sequence[Experience]], experiences: Sequence[Experience], version: int
    ) -> list[Experience]:
        return self.own.to_compare(upcoming, experiences, version)

    def step(
        self, experiences: Sequence[Experience], version: int, compared: Sequence[Experience] = ()
    ) -> dict[str, float]:
        own = self.own
        if self._sharded:
            self._is_current = False
            self._free_policy()
        with (
            self._launcher.handed("batch", (list(experiences), list(compared))) as batch,
            self._on_all_ranks("step", batch, version),
        ):
            return own.step(experiences, version, compared)

    def sharded_weights(self) -> ShardedWeights | None:
        """The weights, where ranks hold parts of them or will. None: `model` itself is trained."""
        if not self._sharded:
            return None
        if self._own is None:
            return ShardedWeights(dict(self._model.named_parameters()), lambda dtype: read_stored(self._model, dtype))
        model = self._own.model

        def gather(dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
            """Goes on to the end if the caller stops early: the other ranks do."""
            with self._on_all_ranks("gather", dtype):
                tensors = gather_weights(model, dtype)
                for pair in tensors:
                    try:
                        yield pair
                    except GeneratorExit:
                        break
                for _ in tensors:
                    pass

        return ShardedWeights(dict(model.named_parameters()), gather)

    def gather_policy(self) -> None:
        """Brings the weights of the last step into `model`, in host memory, if they are not there: a whole copy."""
        weights = self.sharded_weights()
        if weights is None or self._is_current:
            return
        targets = {name: parameter.data for name, parameter in self._model.named_parameters()}
        for each in targets.values():
            each.untyped_storage().resize_(each.nbytes)
        copy_whole(weights, targets)
        self._is_current = True

    def _free_policy(self) -> None:
        if self._sharded and not self._keeps_policy:
            self._is_current = False
            for parameter in self._model.parameters():
                parameter.data.untyped_storage().resize_(0)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, the same for any number of ranks. What they hold parts of is in files' memory."""
        own = self.own
        if not self._sharded:
            return own.state_dict()
        assert isinstance(own, Trainer), "reward models are not trained in shards"
        with self._on_all_ranks("state_dict"):
            return own.state_dict(partial(copy_to_file, folder=self._run_dir))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.own
        with self._launcher.handed("state", state) as handed, self._on_all_ranks("load_state_dict", handed):
            own.load_state_dict(state)

    def offloadable(self, folder: Path) -> list[Offloadable]:
        """Every rank moves its copy of a component when this one does."""
        own = self.own
        assert isinstance(own, Trainer), "`offload` is refused with other trainers"
        return [RankedComponent(each, self, folder) for each in own.offloadable(folder)]

    def move(self, component: Offloadable, place: StorageTier, folder: Path) -> int:
        """Moves a component on all ranks; returns the bytes moved on this one.

        Raises like the other methods, and OffloadError if there is no room.
        """
        with self._on_all_ranks("move", component.name, place, str(folder)):
            return component.move(place)

    def export(self, folder: Path, policy: PolicyModel) -> None:
        self.own.export(folder, policy)

    def close(self) -> None:
        """Ends the other ranks."""
        for other in self._others:
            other.finish() if self._healthy else other.end()
        self._others = []
        if self._rendezvous is not None:
            leave_group()
            self._launcher.close()
            self._rendezvous = None

    def _check(self) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "trainer.ranks starts processes of its own, but this one belongs to a process group of "
                "torch.distributed already; start the run without torchrun"
            )
        found = torch.cuda.device_count() if self._device.type == "cuda" else self._size
        if found < self._size and not self._launcher.own_gpus:
            text = f"trainer.ranks: {self._size} need a GPU each, and torch finds {found}; lower it"
            raise ConfigError(f"{text}, or on Ray reserve GPUs for each by placement.trainer_gpus")
        if self._spec.config.sharding == "tensor":
            tensor_parallel_plan(self._model, self._size)
        if self._spec.config.sharding == "expert":
            check_expert_parallel(self._model, self._size)
        if self._spec.config.sharding == "context":
            for model in (self._model, self._teacher):
                if model is not None:
                    check_context_parallel(model, self._size)

    def _join(self) -> Trainer | RewardTrainer:
        assert self._rendezvous is not None
        join_group(self._rendezvous, 0, self._size, self._device, self._spec.config.rank_deadline_s)
        for model in (None if self._sharded else self._model, self._teacher):
            if model is not None:
                broadcast_weights(model)
        trained = take_copy(self._model) if self._sharded else self._model
        ranks = RankGroup(0, self._size, self._spec.config.sharding)
        return self._spec.trainer(trained, self._teacher, self._device, ranks)

    @contextmanager
    def _on_all_ranks(self, command: str, *details: Any) -> Iterator[None]:
        """Runs a command on all ranks: on this one the body, on the others by message; waits for them at the end."""
        self._healthy, deadline = False, self._spec.config.rank_deadline_s
        for other in self._others:
            other.send(command, *details)
        try:
            yield
        except RuntimeError as error:
            if is_process_group_error(error):
                raise self._group_error(command, deadline) from error
            raise
        for other in self._others:
            other.wait(command, deadline)
        self._healthy = True

    def _group_error(self, command: str, deadline_s: float) -> RollmillError:
        """Builds the error for a failed collective from the ranks' results.

        A rank that ended or failed explains why others are late or alone.
        """
        outcomes = [other.outcome(command, _GRACE_S) for other in self._others]
        for kind in ("ended", "failed", "late", "alone", "done"):
            for other, outcome in zip(self._others, outcomes, strict=True):
                if outcome.kind == kind:
                    return other.error(command, outcome, deadline_s)
        raise AssertionError("there are other ranks")
