"""`rewards`: users' functions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection


class PythonReward(RewardSection):
    """A user's function `(task, completion) -> float | dict | None`, plain or async."""

    name: Literal["python"]
    function: str
    """`FILE.py:NAME`, `package.module:NAME`, or the name of a reward that a plugin registers."""
    options: dict[str, Any] = {}
    """Keyword arguments passed on."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest wait for one judgement; past it the outcome is `timeout`."""
    run_in: Literal["process", "thread"] = "process"
    """Where a plain function runs. Processes leave the rollouts alone and can be ended; each has its own copy of the
    file's global variables. An async function runs in an event loop of this process."""
    processes: int = Field(4, ge=1)
    """Most processes of this function at once; each starts when it is needed."""
