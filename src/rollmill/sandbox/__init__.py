"""Untrusted Python programs, run with hard limits: `Sandbox().run_sync("print(1)").stdout == "1\\n"`."""

from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.limits import Execution, Limits, Outcome, Result
from rollmill.sandbox.sandbox import Sandbox
from rollmill.sandbox.session import Session

__all__ = ["Execution", "Limits", "Outcome", "Result", "Sandbox", "SandboxError", "Session"]
