"""`rollmill resume`: resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmill.cli.printing import print_summary, progress_view


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
) -> None:
    """Resume an interrupted or killed run from its newest checkpoint."""
    from rollmill.launch import resume

    print_summary(resume(run_dir, progress_view(as_json)), as_json)
