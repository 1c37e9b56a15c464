"""Untrusted Python programs, run with hard limits: `Sandbox().run_sync("print(1)").stdout == "1\\n"`."""

from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.limits import Limits, Outcome, Result
from rollmill.sandbox.sandbox import Sandbox

__all__ = ["Limits", "Outcome", "Result", "Sandbox", "SandboxError"]
