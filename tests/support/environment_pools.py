"""Pools of the environments in hostile_environments.py, without a run around them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollmill.config.environments import EnvironmentSection
from rollmill.config.rollout import SamplingConfig
from rollmill.config.section import registered_sections
from rollmill.registry import import_file
from rollmill.rollout.environments.pool import EnvironmentPool
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

HOSTILE = Path(__file__).with_name("hostile_environments.py")


def section(name: str = "Hostile", **keys: Any) -> EnvironmentSection:
    """The section of a registered environment."""
    import_file(HOSTILE)
    [found] = [each for each in registered_sections("environment") if each.__name__ == name]
    made = found.model_validate({"name": name, **keys})
    assert isinstance(made, EnvironmentSection)
    return made


def pool(name: str = "Hostile", **keys: Any) -> EnvironmentPool:
    """A pool of such environments."""
    return EnvironmentPool(section(name, **keys))


def rollout(task: Task | None = None, index: int = 0, seed: int = 5) -> Rollout:
    """A rollout that an environment is made for; nobody asks a policy."""
    task = task or Task("t:1", "go")
    nobody: Any = None
    return Rollout("g/0", task, "g", index, seed + index, seed, SamplingConfig(), nobody, nobody)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test as pytest runs it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
