"""What environments of run files have in common."""

from __future__ import annotations

from pydantic import Field

from rollmill.config.section import NamedSection


class EnvironmentSection(NamedSection):
    """An environment chosen by name; its other keys are its options."""

    processes: int = Field(0, ge=0)
    """Worker processes that environments live in, several in each; 0: in this process, in threads. For environments
    that are not safe to share a process with others, that hang, or that may crash."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest a reset or a step may take; past it the rollout has failed, and with `processes` the worker is ended."""
    restart_after: int = Field(1000, ge=1)
    """Episodes after which a worker process is replaced, against leaks. Only with `processes`."""
    memory_gb: float = Field(4.0, gt=0)
    """A worker process that holds more is replaced when its episodes have ended; one that holds twice as much is ended
    at once. Only with `processes`."""

    def arguments(self) -> dict[str, object]:
        """The options of the environment itself."""
        common = EnvironmentSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}
