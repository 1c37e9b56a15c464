"""`rollmill checkpoints RUN`: list a run's checkpoints, and verify them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table

if TYPE_CHECKING:
    from rollmill.orchestrator.checkpoint_listing import CheckpointListing

HEADER = ("checkpoint", "size", "written", "format", "rollmill", "state")


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, and compare with the hashes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a run's checkpoints. With --verify the exit code is 1 if one of them is damaged."""
    from rollmill.orchestrator.checkpoint_listing import list_checkpoints
    from rollmill.trackers.rollout_log import check_run_dir

    found = list_checkpoints(check_run_dir(run), verify=verify)
    if as_json:
        print_json({"run": str(run), "verified": verify, "checkpoints": [asdict(each) for each in found]})
    elif found:
        print_table("", HEADER, [_row(each) for each in found])
        for each in found:
            for damage in each.damage:
                print_line(f"{each.name}: {damage}")
    else:
        print_line(f"{run} has no checkpoint yet")
    if verify and any(each.state in ("damaged", "unreadable") for each in found):
        if not as_json and any(each.state == "damaged" for each in found):
            print_line(f"`rollmill resume {run}` sets a damaged newest one aside, and goes on from the one before it")
        raise typer.Exit(1)


def _row(each: CheckpointListing) -> list[object]:
    from rollmill.files import format_size

    size = format_size(each.bytes) if each.bytes >= 2**20 else f"{each.bytes >> 10} KiB"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.written_at))
    return [each.name, size, when, each.format, each.rollmill or None, each.state]
