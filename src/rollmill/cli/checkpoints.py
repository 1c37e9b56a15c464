"""`rollmill checkpoints RUN`: list a run's checkpoints, and verify them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table

HEADER = ("checkpoint", "size", "written", "format", "rollmill", "state")


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """A checkpoint as the command lists it.

    `state` is `whole`, `damaged`, `complete` (no file is missing or has another size; contents were not verified),
    `not verifiable` (format 0), `unreadable` (of a later format, for example) or `set aside`.
    """

    name: str
    step: int
    state: str
    bytes: int
    written_at: float  #: seconds since the epoch
    format: int | None = None  #: None: of a later version, or unreadable
    rollmill: str = ""  #: version that wrote it; empty before format 1
    damage: list[str] = field(default_factory=list)


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, and compare with the hashes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a run's checkpoints. With --verify the exit code is 1 if one of them is damaged."""
    from rollmill.orchestrator.checkpoint import Checkpoints
    from rollmill.trackers.rollout_log import check_run_dir

    checkpoints = Checkpoints(check_run_dir(run))
    found = [_listing(checkpoints.path(step), step, verify) for step in checkpoints.steps()]
    aside = [_listing(path, int(path.name.split("-")[1]), verify, aside=True) for path in checkpoints.set_aside()]
    if as_json:
        print_json({"run": str(run), "verified": verify, "checkpoints": [asdict(each) for each in (*found, *aside)]})
    elif found or aside:
        print_table("", HEADER, [_row(each) for each in (*found, *aside)])
        for each in (*found, *aside):
            for damage in each.damage:
                print_line(f"{each.name}: {damage}")
    else:
        print_line(f"{run} has no checkpoint yet")
    if verify and any(each.state in ("damaged", "unreadable") for each in found):
        if not as_json and any(each.state == "damaged" for each in found):
            print_line(f"`rollmill resume {run}` sets a damaged newest one aside, and goes on from the one before it")
        raise typer.Exit(1)


def _listing(path: Path, step: int, verify: bool, *, aside: bool = False) -> CheckpointListing:
    from rollmill.errors import CheckpointError, DamagedCheckpointError
    from rollmill.orchestrator.manifest import find_damage, read_manifest

    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    try:
        manifest = read_manifest(path)
        damage = find_damage(path, content=verify)
    except DamagedCheckpointError as error:  # the manifest itself
        manifest, damage = None, error.damage
    except CheckpointError as error:
        return CheckpointListing(path.name, step, "unreadable", size, path.stat().st_mtime, damage=[str(error)])
    if aside:
        state = "set aside"
    elif damage:
        state = "damaged"
    elif manifest is None:
        state = "not verifiable"
    else:
        state = "whole" if verify else "complete"
    if manifest is None:
        number = None if damage else 0
        return CheckpointListing(path.name, step, state, size, path.stat().st_mtime, number, damage=damage)
    version, when = manifest.rollmill, manifest.written_at
    return CheckpointListing(path.name, step, state, size, when, manifest.format, version, damage)


def _row(each: CheckpointListing) -> list[object]:
    from rollmill.files import format_size

    size = format_size(each.bytes) if each.bytes >= 2**20 else f"{each.bytes >> 10} KiB"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.written_at))
    return [each.name, size, when, each.format, each.rollmill or None, each.state]
