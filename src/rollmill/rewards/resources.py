"""What the rewards of a judge share, made when first asked for and closed with the judge."""

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
    """Processes, threads and models for the rewards of one judge.

    `workers` is the number of grader processes; `tokenizer` is what the completions' tokens are of, None where they are
    text; `device` is where models go, None: a GPU where torch finds one.
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
        """Threads for functions that block, and an event loop that no training step holds up."""
        return self.shared("threads", FunctionThreads)

    def shared(self, key: str, make: Callable[[], Shared]) -> Shared:
        """What is kept under `key`; made at the first call, closed with the judge."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]  # type: ignore[return-value]

    def close(self) -> None:
        """Close all of it, even where closing one fails. May be called twice."""
        with ExitStack() as stack:
            for each in self._made.values():
                stack.callback(each.close)
