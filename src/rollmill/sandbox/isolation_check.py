"""Runs the hostile programs against a backend and reports whether it contains them here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.errors import SandboxError
from rollmill.sandbox import syscall_check
from rollmill.sandbox.attacks import ATTACKS, Attack
from rollmill.sandbox.backend import BackendName, build_backend
from rollmill.sandbox.limits import ProgramResult
from rollmill.sandbox.sandbox import Sandbox
from rollmill.sandbox.visible_files import build_filesystem_view


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """The result of an isolation check on this machine."""

    backend: BackendName
    safe: bool
    """True if it works, every hostile program was contained, and every system call was answered as the table says."""
    programs: int
    """Number of hostile programs that were run."""
    through: tuple[str, ...]
    """The names of those that were not contained."""
    calls: int
    """Number of system calls that were compared with the table of allowed ones."""
    wrong_calls: tuple[str, ...]
    """Those that were answered differently, with the answer."""
    missing: str
    """The reason if the backend does not work here; else empty."""
    lacks: tuple[str, ...]
    """Guarantees that it does not give even if it is safe."""
    no_cgroups: str
    """The reason if no control groups limit all processes of a program together; else empty, also if the backend does
    not work.
    """

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


_AT_ONCE = 8
"""Programs at once; most of them wait for their limits, not for a CPU."""


async def run_attacks(sandbox: Sandbox, programs: Sequence[Attack] = ()) -> list[tuple[Attack, ProgramResult]]:
    """Run attack programs (all by default), except those that the sandbox's backend cannot run.

    Raises SandboxError if the sandbox does not start.
    """
    backend = await asyncio.to_thread(sandbox.chosen)
    attacks = [attack for attack in programs or ATTACKS if attack.is_for(backend)]
    results = await asyncio.gather(*(sandbox.run(attack.program, limits=attack.limits) for attack in attacks))
    return list(zip(attacks, results, strict=True))


def check_isolation(backend: BackendName) -> IsolationReport:
    """Attack a backend, except the plain one: nothing would stop the programs."""
    lacks = build_backend(backend, build_filesystem_view([])).lacks
    if backend == "plain":
        return IsolationReport(backend, False, 0, (), 0, (), "", lacks, "")
    try:
        with Sandbox(backend=backend, jobs=_AT_ONCE) as sandbox:
            found = asyncio.run(run_attacks(sandbox))
            probes = {kind: syscall_check.build_probes(kind) for kind in syscall_check.KINDS[backend]}
            wrong = [
                line
                for kind, calls in probes.items()
                for line in asyncio.run(syscall_check.check_syscalls(sandbox, kind, calls))
            ]
            no_cgroups = sandbox.without_cgroups()
    except SandboxError as error:
        return IsolationReport(backend, False, 0, (), 0, (), str(error), lacks, "")
    through = tuple(attack.name for attack, result in found if not attack.is_contained(result, backend))
    safe, count = not through and not wrong, sum(map(len, probes.values()))
    return IsolationReport(backend, safe, len(found), through, count, tuple(wrong), "", lacks, no_cgroups)
