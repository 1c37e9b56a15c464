"""`rollmill sandbox`: test this machine's sandbox backends, and run a program in a sandbox."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from rollmill.errors import ConfigError
from rollmill.files import read_text

HELP = "Run untrusted Python programs, and check the isolation."


def check(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Test every backend with hostile programs and all system calls. Exits with 0 if one is safe, else with 1."""
    from rollmill.sandbox.backend_selection import SAFE_BACKENDS
    from rollmill.sandbox.isolation_check import check_isolation

    reports = [check_isolation(backend) for backend in (*SAFE_BACKENDS, "plain")]
    chosen = next((report.backend for report in reports if report.safe), None)
    if as_json:
        print(json.dumps({"backend": chosen, "backends": [report.as_json() for report in reports]}))
    else:
        for report in reports:
            contained = f"{report.programs - len(report.through)} of {report.programs} hostile programs contained"
            verdict = "safe" if report.safe else "NOT SAFE"
            print(f"{report.backend:<12}{verdict:<10}{contained if report.programs else ''}".rstrip())
            for line in (*report.missing.splitlines(), *(f"not contained: {name}" for name in report.through)):
                print(f"    {line}")
            if report.calls:
                right = report.calls - len(report.wrong_calls)
                print(f"    {right} of {report.calls} system calls answered as the table of allowed calls says")
            for line in report.wrong_calls:
                print(f"    wrong: {line}")
            for line in report.lacks:
                print(f"    lacks: {line}")
            if report.no_cgroups:
                print(f"    no cgroups: {report.no_cgroups}; limits are those of each process")
        print(f"in use: {chosen}" if chosen else "no backend is safe here")
    raise typer.Exit(0 if chosen else 1)


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The program.")],
    stdin: Annotated[
        Path | None, typer.Option("--stdin", metavar="FILE", help="Standard input of the program.")
    ] = None,
    wall_s: Annotated[float, typer.Option("--wall-s", help="Timeout in seconds.")] = 10.0,
    memory_mb: Annotated[int, typer.Option("--memory-mb", help="Address space, MiB.")] = 512,
    package: Annotated[
        list[str] | None, typer.Option("--package", metavar="NAME", help="A package it may import (repeatable).")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="auto, namespaces, landlock or plain.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run a program in a sandbox and print its output. Exits with 0 if its outcome is ok, else with 1."""
    from rollmill.sandbox import Sandbox, SandboxLimits
    from rollmill.sandbox.backend_selection import BackendChoice

    chosen = next((name for name in get_args(BackendChoice) if name == backend), None)
    if chosen is None:
        raise ConfigError(f"--backend is {', '.join(get_args(BackendChoice))}, not {backend!r}")
    try:
        limits = SandboxLimits(wall_s=wall_s, cpu_s=max(1, round(wall_s)), memory_mb=memory_mb)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with Sandbox(limits, packages=package or [], jobs=1, backend=chosen) as sandbox:
        result = sandbox.run_sync(_text(file, "FILE"), _text(stdin, "--stdin") if stdin else "")
        used = sandbox.chosen()
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"backend": used}))
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.outcome not in ("ok", "error"):
            print(f"ended by the sandbox: {result.outcome} after {result.seconds:.3g} s", file=sys.stderr)
    raise typer.Exit(0 if result.outcome == "ok" else 1)


def _text(path: Path, name: str) -> str:
    try:
        return read_text(path)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from error


COMMANDS = {"check": check, "run": run}
"""Name of a command -> function."""
