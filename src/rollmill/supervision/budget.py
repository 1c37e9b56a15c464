"""Restarts that a run has left, and how a process that trains has ended; for every placement."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

from rollmill.config.supervision import SupervisionConfig
from rollmill.errors import RollmillError, UserExitError, explain_path_error, is_out_of_memory, is_recoverable

_LONGEST_BACKOFF_S = 300.0


class RestartBudget:
    """Counts restarts without new progress. A step beyond the furthest one gives all restarts back."""

    def __init__(self, config: SupervisionConfig) -> None:
        self.allowed, self._backoff_s = config.restarts, config.backoff_s
        self.furthest, self.used = 0, 0

    def reach(self, step: int) -> None:
        """Note that a step is made."""
        if step > self.furthest:
            self.furthest, self.used = step, 0

    def spend(self) -> float | None:
        """Use one restart, and return the seconds to wait before it; None if none is left."""
        if self.used >= self.allowed:
            return None
        self.used += 1
        return min(self._backoff_s * 2.0 ** (self.used - 1), _LONGEST_BACKOFF_S)

    def describe(self) -> str:
        """Say how often the run has failed, for the last error."""
        times = self.used + 1
        return f"It failed {times} time{'s' if times > 1 else ''} after step {self.furthest} (supervise.restarts)"


@dataclass(frozen=True)
class RunOutcome:
    """End of a process that trains, as it reports it. `message` is for the user."""

    status: Literal["done", "interrupted", "failed"]
    summary: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    exit_code: int = 1
    error: str = ""  #: name of the error's class
    recoverable: bool = False
    out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException) -> RunOutcome:
        """Describe an error that ended the run. Errors that are not the user's have their traceback as message."""
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", exit_code=130)
        if isinstance(error, SystemExit):
            error = UserExitError.of(error)
        text = str(error) if isinstance(error, RollmillError) else None
        if isinstance(error, OSError):
            text = explain_path_error(error)
        if text is None or os.environ.get("ROLLMILL_TRACEBACK") == "1":
            text = "".join(traceback.format_exception(error)).rstrip()
        code = error.exit_code if isinstance(error, RollmillError) else 1
        kind, lasting = type(error).__name__, not is_recoverable(error)
        return cls("failed", {}, text, code, kind, not lasting, is_out_of_memory(error))


class RunFailedError(RollmillError):
    """A run has failed in another process; has the message and the exit code of its error."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[str, int]]:
        return type(self), (str(self), self.exit_code)
