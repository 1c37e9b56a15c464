"""`rollmill init` and `rollmill quickstart`: a commented first run file, and a complete run, explained."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rollmill.errors import ConfigError
from rollmill.startup import quick_imports


def init(
    file: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented first run file."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    text = (files("rollmill.cli") / "first_run.yaml").read_text(encoding="utf-8")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    print(f"wrote {file}. Next: put your tasks where taskset.path says, then")
    print(f"  rollmill check {file}\n  rollmill run {file}")


def quickstart(
    out: Annotated[Path | None, typer.Option(help="Output folder (default: runs/quickstart, numbered).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data order, weights and sampling.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json on stdout, the explanation on stderr.")
    ] = False,
) -> None:
    """Train a small model to add with a faulty teacher, then fix its errors by reinforcement learning: about two
    minutes."""
    with quick_imports():
        from rollmill.launch import next_free_folder
        from rollmill.quickstart.demo import run_quickstart

    folder = next_free_folder(Path("runs/quickstart")) if out is None else out
    summary = run_quickstart(folder, seed, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(summary))
