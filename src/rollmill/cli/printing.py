"""Output of commands: tables, lines without terminal control characters, and JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from rollmill.errors import RollmillError

if TYPE_CHECKING:
    from rich.text import Text

    from rollmill.trackers.run_views import PlainView


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; without lines and colours, and as wide as it is, if stdout is not a terminal."""
    from rollmill.trackers.console import one_line

    cells = [[one_line(_cell(value), 60) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in ([title] if title else []) + align_columns([list(header), *cells]):
            print_line(line)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left")
    for name in header:
        table.add_column(Text(name))
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with columns that begin at the same place, two spaces apart."""
    from rich.cells import cell_len  # of East Asian characters, too

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_line(line: str | Text) -> None:
    """Print a line without terminal control characters; in colour only on a terminal."""
    if isinstance(line, str) or not sys.stdout.isatty():
        from rollmill.trackers.console import printable

        typer.echo(printable(str(line)))
        return
    from rich.console import Console

    Console().print(line)


def print_json(value: Any) -> None:
    """Print one line of JSON, with NaN and infinities as null."""
    from rollmill.files import to_jsonable

    typer.echo(json.dumps(to_jsonable(value), allow_nan=False))


def progress_view(as_json: bool) -> PlainView | None:
    """The view of a run's progress: lines on stderr if stdout holds JSON alone, else None for the default view."""
    from rollmill.trackers.run_views import PlainView

    return PlainView(sys.stderr) if as_json else None


def print_summary(summary: dict[str, Any], as_json: bool) -> None:
    """Print the summary of a run as JSON, or its final line. Raises RollmillError if the JSON cannot be written."""
    from rollmill.trackers.console import drop_output, print_or_drop

    if as_json:
        try:
            print(json.dumps(summary), flush=True)
        except OSError as error:
            drop_output(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                raise RollmillError(f"the run is done, but its summary cannot be printed: {error.strerror}") from error
        return
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    accuracy = "" if after is None else f"; accuracy {before:.3f} -> {after:.3f}"
    done = f"done: {summary['steps']} steps in {summary['seconds']:.1f} s{accuracy}; {summary['checkpoint']}"
    if print_or_drop(done, sys.stdout):
        drop_output(sys.stdout)  # else Python fails when it flushes it at the end
