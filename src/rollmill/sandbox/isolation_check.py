"""Runs the hostile programs against a backend, and says what that backend is worth here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.sandbox.attacks import ATTACKS, Attack
from rollmill.sandbox.backend import BackendName, build_backend
from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.limits import ProgramResult
from rollmill.sandbox.sandbox import Sandbox
from rollmill.sandbox.visible_files import build_filesystem_view


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """What a backend is worth on this machine."""

    backend: BackendName
    safe: bool
    """Whether it works and every hostile program was contained."""
    programs: int
    """How many hostile programs were run."""
    through: tuple[str, ...]
    """The names of those that were not contained."""
    missing: str
    """Why the backend does not work here; empty if it does."""
    lacks: tuple[str, ...]
    """What it does not promise even where it is safe."""
    no_cgroups: str
    """Why no control groups limit all processes of a program together; empty if they do, or if it does not work."""

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        return asdict(self)


_AT_ONCE = 8
"""Most programs wait for their limits, not for a processor."""


async def run_attacks(sandbox: Sandbox, programs: Sequence[Attack] = ()) -> list[tuple[Attack, ProgramResult]]:
    """Run hostile programs, all if none are given, except for those that the sandbox's backend cannot run.

    Raises SandboxError if the sandbox does not start.
    """
    backend = await asyncio.to_thread(sandbox.chosen)
    meant = [hostile for hostile in programs or ATTACKS if hostile.is_for(backend)]
    results = await asyncio.gather(*(sandbox.run(hostile.program, limits=hostile.limits) for hostile in meant))
    return list(zip(meant, results, strict=True))


def check_isolation(backend: BackendName) -> IsolationReport:
    """Attack a backend. The plain one is not attacked, because nothing would stop the programs."""
    lacks = build_backend(backend, build_filesystem_view([])).lacks
    if backend == "plain":
        return IsolationReport(backend, False, 0, (), "", lacks, "")
    try:
        with Sandbox(backend=backend, jobs=_AT_ONCE) as sandbox:
            found = asyncio.run(run_attacks(sandbox))
            no_cgroups = sandbox.without_cgroups()
    except SandboxError as error:
        return IsolationReport(backend, False, 0, (), str(error), lacks, "")
    through = tuple(hostile.name for hostile, result in found if not hostile.is_contained(result, backend))
    return IsolationReport(backend, not through, len(found), through, "", lacks, no_cgroups)
