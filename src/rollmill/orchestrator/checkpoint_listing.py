"""Lists the checkpoints of a run with the state of their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollmill.errors import CheckpointError, DamagedCheckpointError
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.manifest import find_damage, require_manifest


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """A checkpoint of a run, and what is known of its files.

    `state` is `whole`, `damaged`, `complete` (no file is missing or has another size; contents were not verified),
    `unreadable` (of another format, for example) or `set aside`.
    """

    name: str
    step: int
    state: str
    bytes: int
    written_at: float  #: seconds since the epoch
    format: int | None = None  #: None: unreadable, or the manifest is lost
    rollmill: str = ""  #: version that wrote it
    damage: list[str] = field(default_factory=list)


def list_checkpoints(run_dir: Path, *, verify: bool = False, name: str | None = None) -> list[CheckpointListing]:
    """List the checkpoints of a run in the order of steps, then those that were set aside.

    Args:
        verify: read every byte, and compare with the hashes.
        name: only the checkpoint of this name.
    """
    checkpoints = Checkpoints(run_dir)
    kept = [(checkpoints.path(step), step, False) for step in checkpoints.steps()]
    aside = [(path, int(path.name.split("-")[1]), True) for path in checkpoints.damaged()]
    chosen = [each for each in (*kept, *aside) if name in (None, each[0].name)]
    return [_listing(path, step, verify, aside=moved) for path, step, moved in chosen]


def _listing(path: Path, step: int, verify: bool, *, aside: bool = False) -> CheckpointListing:
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    try:
        manifest = require_manifest(path)
        damage = find_damage(path, content=verify)
    except DamagedCheckpointError as error:  # the manifest itself
        state, when = "set aside" if aside else "damaged", path.stat().st_mtime
        return CheckpointListing(path.name, step, state, size, when, damage=error.damage)
    except CheckpointError as error:
        state = "set aside" if aside else "unreadable"
        return CheckpointListing(path.name, step, state, size, path.stat().st_mtime, damage=[str(error)])
    if aside:
        state = "set aside"
    elif damage:
        state = "damaged"
    else:
        state = "whole" if verify else "complete"
    version, when = manifest.rollmill, manifest.written_at
    return CheckpointListing(path.name, step, state, size, when, manifest.format, version, damage)
