"""Resources that the rewards of a manager share: created on first use, closed with the manager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rollmill.rewards.function_threads import FunctionThreads
from rollmill.rewards.grader_pool import GraderPool


class SupportsClose(Protocol):
    """Something that holds processes, threads or connections."""

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=SupportsClose)


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

    @property
    def graders(self) -> GraderPool:
        """Processes that evaluate text under a time limit."""
        return self.shared("graders", lambda: GraderPool(self.workers))

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
