"""`rollmill init`: write a commented first run file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rollmill.errors import ConfigError


def command(
    file: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented first run file."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(template(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    print(f"wrote {file}. Next: put your tasks where taskset.path says, then")
    print(f"  rollmill check {file}\n  rollmill run {file}")


def template() -> str:
    """Return the first run file: SFT on worked solutions, then GRPO on their answers."""
    return (files("rollmill.cli") / "first_run.yaml").read_text(encoding="utf-8")
