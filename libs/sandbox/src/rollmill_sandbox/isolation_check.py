"""Runs the hostile programs against a backend and reports whether it contains them here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmill_sandbox import syscall_check
from rollmill_sandbox.attacks import ATTACKS, Attack
from rollmill_sandbox.backend import BackendName, build_backend
from rollmill_sandbox.backend_selection import SAFE_BACKENDS
from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.limits import ProgramResult
from rollmill_sandbox.sandbox import Sandbox
from rollmill_sandbox.visible_files import build_filesystem_view


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

    def as_lines(self) -> list[str]:
        """Return it as lines for a terminal: the verdict, and below it, indented, what is behind it."""
        contained = f"{self.programs - len(self.through)} of {self.programs} hostile programs contained"
        verdict = f"{self.backend:<12}{'safe' if self.safe else 'NOT SAFE':<10}{contained if self.programs else ''}"
        details = [*self.missing.splitlines(), *(f"not contained: {name}" for name in self.through)]
        if self.calls:
            right = self.calls - len(self.wrong_calls)
            details.append(f"{right} of {self.calls} system calls answered as the table of allowed calls says")
        details += [f"wrong: {line}" for line in self.wrong_calls]
        details += [f"lacks: {line}" for line in self.lacks]
        if self.no_cgroups:
            details.append(f"no cgroups: {self.no_cgroups}; limits are those of each process")
        return [verdict.rstrip(), *(f"    {line}" for line in details)]


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


def print_checks(as_json: bool) -> bool:
    """Check every backend, print the reports as text or as one JSON object, and return True if a backend is safe.

    Raises SandboxError if no program can be run here, whatever the backend.
    """
    reports = [check_isolation(backend) for backend in (*SAFE_BACKENDS, "plain")]
    chosen = next((report.backend for report in reports if report.safe), None)
    if as_json:
        print(json.dumps({"backend": chosen, "backends": [report.as_json() for report in reports]}))
    else:
        print("\n".join(line for report in reports for line in report.as_lines()))
        print(f"in use: {chosen}" if chosen else "no backend is safe here")
    return chosen is not None
