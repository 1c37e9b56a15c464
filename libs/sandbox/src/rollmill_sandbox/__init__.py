"""Runs untrusted Python programs with hard limits: `Sandbox().run_sync("print(1)").stdout == "1\\n"`.

`Sandbox` runs whole programs, and opens sessions (`SandboxSession`), whose interpreter keeps its state between texts.
`SandboxLimits` bound both; a `ProgramResult` or a `SessionExecution` says how a run ended and what it printed.
"""

from rollmill_sandbox.backend_selection import BackendChoice
from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.limits import ProgramOutcome, ProgramResult, SandboxLimits, SessionExecution
from rollmill_sandbox.sandbox import Sandbox
from rollmill_sandbox.session import HostCallback, SandboxSession

__all__ = [
    "BackendChoice",
    "HostCallback",
    "ProgramOutcome",
    "ProgramResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSession",
    "SessionExecution",
]
