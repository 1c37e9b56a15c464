"""`rollmill report RUN`: write the report of a run, at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Run directory; the run may still be running, or have been killed.")],
) -> None:
    """Write RUN/report.html from what the run has recorded so far, and print its path."""
    from rollmill.apps.studio.report.run_report import write_report

    print(write_report(run))
