"""`rollmill testcases`: generate tests for coding problems, and keep the problems whose tests are valid."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.errors import ConfigError
from rollmill.files import describe_json_error, parse_strict_json, read_text

if TYPE_CHECKING:
    from rollmill.rewards.code.generation import CodingProblem, GeneratedTestCases, ValidationCriteria

_REASON_WIDTH = 70


def command(
    input: Annotated[
        Path, typer.Option("--input", help='JSONL file with {"generator": ..., "submissions": [...], ...} per line.')
    ],
    output: Annotated[Path, typer.Option("--output", help="Output file of the kept problems, with `tests`.")],
    cases: Annotated[int, typer.Option(min=1, help="Cases generated per problem.")] = 50,
    submissions: Annotated[int, typer.Option(min=1, help="Submissions used per problem.")] = 10,
    agree: Annotated[int, typer.Option(min=1, help="Minimum submissions that agree on a valid case.")] = 7,
    solve: Annotated[int, typer.Option(min=1, help="Minimum submissions that pass all valid cases.")] = 9,
    time_limit_s: Annotated[float, typer.Option("--time-limit-s", help="Timeout of one case.")] = 5.0,
    memory_mb: Annotated[int, typer.Option("--memory-mb", min=32, help="Address space of a program, MiB.")] = 512,
    jobs: Annotated[int, typer.Option(min=0, help="Concurrent programs. 0: one per CPU core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, one object per line.")] = False,
) -> None:
    """Generate tests, validate them with reference submissions, and write the problems whose tests are valid.

    A line has `generator` (a program that reads a number and prints a case), `submissions` (programs), for functions
    `entry_point`, and whatever else a task needs. The lines are written without the first two, with `tests`.
    """
    from rollmill.rewards.code.generation import ValidationCriteria

    if not 0 < time_limit_s < math.inf:
        raise ConfigError(f"--time-limit-s {time_limit_s:g}: it has to be above 0, and finite")
    try:
        criteria = ValidationCriteria(cases, submissions, agree, solve)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = _rows(input)
    found = asyncio.run(_generate([problem for _, problem in rows], criteria, time_limit_s, memory_mb, jobs))
    kept = [row | {"tests": made.tests} for (row, _), made in zip(rows, found, strict=True) if made.tests]
    try:
        output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    names = [str(row.get("id", number)) for number, (row, _) in enumerate(rows, 1)]
    if as_json:
        for name, made in zip(names, found, strict=True):
            print(json.dumps({"problem": name, "kept": bool(made.tests), **_numbers(made), "reason": made.reason}))
    else:
        _print_table(names, found)


def _rows(path: Path) -> list[tuple[dict[str, Any], CodingProblem]]:
    """Read the lines of a file, without the keys that make the tests, and their problems. Raises ConfigError naming the
    line."""
    from rollmill.rewards.code.generation import CodingProblem

    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_strict_json(line, unique_keys=True)
        except ValueError as error:
            raise ConfigError(f"{where}: {describe_json_error(error)}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
        generator, submissions, name = row.pop("generator", None), row.pop("submissions", None), row.get("entry_point")
        if not isinstance(generator, str):
            raise ConfigError(f"{where}: `generator` has to be the text of a program, found {generator!r:.60}")
        if not isinstance(submissions, list) or not all(isinstance(each, str) for each in submissions):
            raise ConfigError(f"{where}: `submissions` has to be a list of programs, found {submissions!r:.60}")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{where}: `entry_point` has to be the name of a function, found {name!r:.60}")
        found.append((row, CodingProblem(generator, submissions, name)))
    if not found:
        raise ConfigError(f"{path}: no lines with problems")
    return found


async def _generate(
    problems: list[CodingProblem], criteria: ValidationCriteria, time_limit_s: float, memory_mb: int, jobs: int
) -> list[GeneratedTestCases]:
    from rollmill.program_sandbox import ProgramSandbox
    from rollmill.rewards.code.generation import generate_tests
    from rollmill_sandbox import SandboxLimits

    limits = SandboxLimits(wall_s=time_limit_s, cpu_s=int(time_limit_s) + 1, memory_mb=memory_mb)
    with ProgramSandbox(limits, jobs=jobs) as sandbox:
        return [await generate_tests(problem, sandbox, criteria) for problem in problems]


def _numbers(made: GeneratedTestCases) -> dict[str, int]:
    return {"cases": made.cases, "valid": made.valid, "solved": made.solved}


def _print_table(names: list[str], found: list[GeneratedTestCases]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("problem", "cases", "valid", "solved", "")
    for name, made in zip(names, found, strict=True):
        table.add_row(name, *map(str, _numbers(made).values()), (made.reason or "kept")[:_REASON_WIDTH])
    kept = sum(bool(made.tests) for made in found)
    table.caption = f"{kept} of {len(found)} problems kept"
    Console(file=sys.stdout).print(table)
