"""Resources that the rewards of a manager share: created on first use, closed with the manager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rollmill.concurrency import FunctionThreads
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.worker_process import WorkerFunction


class SupportsClose(Protocol):
    """Something that holds processes, threads or connections."""

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=SupportsClose)

_warm_pools: dict[str, GraderPool] = {}
"""Pools whose processes were started before they were needed."""


def close_warm_pools() -> None:
    """Close the pools that nobody has taken."""
    while _warm_pools:
        _warm_pools.popitem()[1].close()


@dataclass(slots=True, eq=False)
class RewardResources:
    """Processes, threads and models for the rewards of one manager.

    `workers` is the number of grader processes. `tokenizer` is the tokenizer of the completions' tokens, None if they
    are text. `device` is the device for models; None: a GPU if torch finds one.
    """

    workers: int = 1
    tokenizer: Any = None
    device: str | None = None
    _made: dict[str, SupportsClose] = field(default_factory=dict)
    _making: threading.RLock = field(default_factory=threading.RLock)
    _loads: list[tuple[GraderPool, WorkerFunction, str]] = field(default_factory=list)

    @property
    def graders(self) -> GraderPool:
        """Processes that evaluate text under a time limit."""
        return self.pool(f"graders {self.workers}", lambda: GraderPool(self.workers))

    def graders_for(self, function: WorkerFunction) -> GraderPool:
        """`graders` for a reward that will call this function in them."""
        self.will_load(self.graders, function)
        return self.graders

    def pool(self, key: str, make: Callable[[], GraderPool]) -> GraderPool:
        """Return the pool stored under `key`, as `shared`: one that was kept with started processes, if there is
        one."""
        return self.shared(key, lambda: _warm_pools.pop(key, None) or make())

    def will_load(self, pool: GraderPool, function: WorkerFunction, setup: str = "") -> None:
        """Note what a pool's processes will load, so that `keep_warm` can start them."""
        self._loads.append((pool, function, setup))

    def keep_warm(self) -> None:
        """Start the pools' processes and keep them for the next resources of this process that want such a pool; close
        everything else."""
        for pool, function, setup in self._loads:
            pool.warm(function, setup)
        warm = {id(pool) for pool, _, _ in self._loads}
        with self._making:
            for key in [key for key, each in self._made.items() if id(each) in warm]:
                made = self._made.pop(key)
                assert isinstance(made, GraderPool)
                if (other := _warm_pools.pop(key, None)) is not None:
                    other.close()
                _warm_pools[key] = made
        self.close()

    @property
    def threads(self) -> FunctionThreads:
        """Threads for functions that block, and an event loop independent of the training step."""
        return self.shared("threads", FunctionThreads)

    def shared(self, key: str, make: Callable[[], Shared]) -> Shared:
        """Return the resource stored under `key`; created by the first call, closed with the manager."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]  # type: ignore[return-value]

    def close(self) -> None:
        """Close all resources, even if closing one fails. May be called twice."""
        with ExitStack() as stack:
            for each in self._made.values():
                stack.callback(each.close)
