"""`rollmill eval`: evaluate a checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example evaluation.samples=4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint on the run's held-out tasks."""
    from rollmill.launch import evaluate

    metrics = evaluate(run_dir, step, overrides or [])
    if as_json:
        print(json.dumps(metrics))
        return
    for name, value in metrics.items():
        print(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}")
