"""`rollmill import-config FILE`: a run file from a configuration of TRL, verl or Trinity-RFT, or from a run file with
former names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmill.apps.importing.conversion import SOURCES, import_file, to_run_file
from rollmill.cli.printing import print_json, print_line
from rollmill.config.loader import load_run
from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError
from rollmill.files import atomic_write


def command(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file (YAML), or run file.")],
    out: Annotated[Path, typer.Option("--out", help="Run file to write.")] = Path("run.yaml"),
    source: Annotated[
        str | None, typer.Option("--from", help=f"{', '.join(SOURCES)}. Default: found by the keys.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="TRL: number of processes of its run. Default: num_processes, or 1.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the data set, to turn epochs into steps.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Write a run file from a configuration of TRL, verl or Trinity-RFT, and list what has no counterpart.

    A run file of rollmill is written with the names that its keys have now.
    """
    if source is not None and source not in SOURCES:
        raise ConfigError(f"--from {source}: known are {', '.join(SOURCES)}")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists; choose another file, or overwrite it with --force")
    run = import_file(config, source, processes=processes, rows=rows)
    atomic_write(out, to_run_file(run, config).encode())
    problems: list[str] = []
    try:
        load_run(out, require_files=False)
    except ConfigError as error:
        problems = str(error).splitlines()
    if as_json:
        parts = {"lost": run.lost, "notes": run.notes, "unneeded": run.unneeded, "problems": problems}
        print_json({"framework": run.framework, "out": str(out), "run": run.sections or read_plain_yaml(out), **parts})
        return
    print_line(f"wrote {out} from a configuration of {run.framework}")
    for title, texts in (
        ("without a counterpart:", [f"{key}: {text}" for key, text in run.lost.items()]),
        ("to know:", run.notes),
        ("to correct:", problems),
    ):
        if texts:
            print_line(title)
            for text in texts:
                print_line(f"  {text}")
    if run.unneeded:
        print_line(f"not needed here: {', '.join(run.unneeded)}")
    print_line(f"next: rollmill check {out}")
