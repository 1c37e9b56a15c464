"""The error of the sandbox. It never stands for what a program does: that is a Result."""

from __future__ import annotations

from rollmill.errors import RollmillError


class SandboxError(RollmillError):
    """No safe sandbox can be built here, or it was asked for what it cannot do. The message says what is missing."""
