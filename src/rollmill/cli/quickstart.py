"""`rollmill quickstart`: a complete run on a laptop CPU, explained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path | None, typer.Option(help="Output folder (default: runs/quickstart, numbered).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data order, weights and sampling.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json on stdout, the explanation on stderr.")
    ] = False,
) -> None:
    """Train a small model to add with a faulty teacher, then fix its errors by reinforcement learning: about two
    minutes."""
    from rollmill.launch import next_free_folder
    from rollmill.quickstart.demo import run_quickstart

    folder = next_free_folder(Path("runs/quickstart")) if out is None else out
    summary = run_quickstart(folder, seed, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(summary))
