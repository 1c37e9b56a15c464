"""`rollmill run`: run a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Argument(help="The run file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example trainer.lr=1e-4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory (default: runs/NAME).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
) -> None:
    """Run a run file: roll out, judge, train, evaluate, report."""
    from rollmill.cli.launching import launch
    from rollmill.master import run

    summary = launch(lambda view: run(config, overrides or [], out, view), as_json)
    if as_json:
        print(json.dumps(summary))
