"""The error of the sandbox. Failures of a program are not errors but a ProgramResult."""

from __future__ import annotations

from rollmill.errors import RollmillError


class SandboxError(RollmillError):
    """No safe sandbox can be built here, or an invalid request. The message has what is missing."""
