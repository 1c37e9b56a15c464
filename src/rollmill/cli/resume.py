"""`rollmill resume`: resume a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
) -> None:
    """Resume an interrupted or killed run from its newest checkpoint."""
    from rollmill.cli.launching import launch_run
    from rollmill.launch import resume

    summary = launch_run(lambda view: resume(run_dir, view), as_json)
    if as_json:
        print(json.dumps(summary))
