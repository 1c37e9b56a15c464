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
    from rollmill.program_sandbox import sandbox_errors
    from rollmill_sandbox.isolation_check import print_checks

    with sandbox_errors():
        safe = print_checks(as_json)
    raise typer.Exit(0 if safe else 1)


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
    from rollmill.program_sandbox import ProgramSandbox
    from rollmill_sandbox import BackendChoice, SandboxLimits

    chosen = next((name for name in get_args(BackendChoice) if name == backend), None)
    if chosen is None:
        raise ConfigError(f"--backend is {', '.join(get_args(BackendChoice))}, not {backend!r}")
    try:
        limits = SandboxLimits(wall_s=wall_s, cpu_s=max(1, round(wall_s)), memory_mb=memory_mb)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with ProgramSandbox(limits, packages=package or [], jobs=1, backend=chosen) as sandbox:
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
