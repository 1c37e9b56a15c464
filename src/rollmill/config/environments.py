"""Base class of `environment`, which a workflow acts in. The built-in ones stand in `rollmill.rollout.environments`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rollmill.config.section import NamedSection


class EnvironmentSection(NamedSection):
    """An environment chosen by name: its options, and the methods of `rollmill.rollout.environments.Environment`.

    Each rollout has a copy.
    """

    needs_generator: ClassVar[bool] = False  #: acts on tasks of `taskset.generator` only
    containers: ClassVar[bool] = False  #: gives each rollout a container to work in, and no episode of its own

    processes: int = Field(0, ge=0)
    """Number of worker processes for environments, several environments in each; 0: threads of this process. For
    environments that cannot share a process, hang or crash."""
    time_limit_s: float = Field(60.0, gt=0)
    """Timeout of a reset or a step; the rollout then fails, and with `processes` the worker is killed."""
    restart_after: int = Field(1000, ge=1)
    """Episodes after which a worker process is replaced, to limit memory leaks. Only with `processes`."""
    memory_gb: float = Field(4.0, gt=0)
    """Memory limit of a worker process: above it, the worker is replaced once its episodes have ended; above twice as
    much, it is killed at once. Only with `processes`."""

    def arguments(self) -> dict[str, object]:
        """Returns the options of the environment itself."""
        common = EnvironmentSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured with processes 0: it is about worker processes; give processes"
        return {key: text for key in ("restart_after", "memory_gb") if self.processes == 0}

    def picture_keys(self) -> dict[str, str]:
        """Returns the keys because of which it shows pictures, each with a remedy for a model that reads text only."""
        return {}

    def setup(self) -> None:
        """Make the copy of a rollout ready for its first `reset`."""
