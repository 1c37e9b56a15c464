"""Runs untrusted Python programs with hard limits: `Sandbox().run_sync("print(1)").stdout == "1\\n"`."""

from rollmill.errors import SandboxError
from rollmill.sandbox.limits import ProgramOutcome, ProgramResult, SandboxLimits, SessionExecution
from rollmill.sandbox.sandbox import Sandbox
from rollmill.sandbox.session import SandboxSession

__all__ = [
    "ProgramOutcome",
    "ProgramResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSession",
    "SessionExecution",
]
