"""Ranks as Ray actors, on any host: method calls for commands, Ray objects for data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from torch._C._distributed_c10d import Store

from rollmill.errors import count_oom_kills
from rollmill.ray_session import ray_module
from rollmill.trainer.distributed.rank_handle import CommandResult, CommandStatus, RankHandle
from rollmill.trainer.distributed.ranks import TCPRendezvous, open_rendezvous_port
from rollmill.trainer.distributed.worker import RankWorker

_END_S = 5.0


class RayRankHandle(RankHandle):
    """A rank in a Ray actor, which ends with rank 0's.

    Restarting the trainer may fix failures of hosts and networks, but not an error of the rank's own work.

    Args:
        options: options for starting the actor.
    """

    lost: ClassVar[tuple[CommandStatus, ...]] = ("ended", "late", "alone", "done")
    log = "What it printed is in the logs of Ray's session on its host."

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank, self._killed_before = rank, count_oom_kills()
        self._actor = ray_module().remote(RankWorker).options(max_restarts=0, **options).remote()
        self._where: Future[str] = self._actor.where.remote().future()
        self._pending: deque[Future[CommandResult]] = deque()

    @property
    def label(self) -> str:
        started = self._where.done() and self._where.exception() is None
        where = self._where.result() if started else "an actor that has not started"
        return f"rank {self.rank} ({where})"

    def send(self, command: str, *details: Any) -> None:
        self._pending.append(self._actor.run_command.remote(command, *details).future())

    def outcome(self, command: str, deadline_s: float) -> CommandResult:
        errors = ray_module().exceptions
        try:
            found = self._pending[0].result(deadline_s)
        except errors.RayActorError as error:
            text = f"ended: {str(error).strip().splitlines()[-1].rstrip('.')}"
            found = CommandResult("ended", text, self.killed_for_memory())
        except errors.OutOfMemoryError as error:  # by Ray, before the kernel does
            found = CommandResult("ended", f"ended: {str(error).strip().splitlines()[0].rstrip('.')}", True)
        except errors.RayError as error:  # it could not deserialize the command
            found = CommandResult("failed", str(error).strip().splitlines()[-1])
        except TimeoutError:
            return CommandResult("late")
        self._pending.popleft()
        return found

    def end(self) -> None:
        """Kill the process, which may take a moment longer."""
        ray_module().kill(self._actor)
        with suppress(TimeoutError):
            self._actor.where.remote().future().exception(_END_S)

    def finish(self) -> None:
        with suppress(TimeoutError):
            self._actor.ended.remote("done").future().exception(_END_S)
        self.end()


class RayRankLauncher:
    """Starts ranks as Ray actors, which meet at a port of rank 0's host.

    Args:
        options: options for starting each actor, from rank 1.
    """

    def __init__(self, options: Sequence[dict[str, Any]]) -> None:
        self._options = options
        self._store: Store | None = None

    @property
    def own_gpus(self) -> bool:
        return all(each["num_gpus"] >= 1 for each in self._options)

    def open(self) -> TCPRendezvous:
        rendezvous, self._store = open_rendezvous_port(ray_module().util.get_node_ip_address())
        return rendezvous

    def start(self, rank: int, threads: int) -> RayRankHandle:
        return RayRankHandle(rank, self._options[rank - 1])

    @contextmanager
    def handed(self, name: str, value: Any) -> Iterator[Any]:
        """Yields a Ray object reference, which arrives as the value."""
        yield ray_module().put(value)

    def close(self) -> None:
        self._store = None
