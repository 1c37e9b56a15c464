"""Experience buffer between rollouts and the trainer: in memory, or in a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.buffer.base import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.group_queue import GroupQueue
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import DemonstrationPool
from rollmill.buffer.sql import SqlStore
from rollmill.config.buffer import BufferConfig, ReplayConfig
from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError, StoreError
from rollmill.files import read_json_object

DATABASE_FILE = "buffer.sqlite"


def open_store(config: BufferConfig, *, run_dir: Path, run_id: str, persistent: bool) -> ExperienceStore:
    """Open the store of a run, as configured in the section `buffer`.

    Args:
        run_id: identifies the run in a shared database.
        persistent: the run is asynchronous or uses replay, so `auto` means a database.

    Raises:
        StoreError: the database cannot be opened.
    """
    if not config.in_database(persistent):
        return MemoryStore(keep=0 if config.replay is None else config.replay.capacity)
    from rollmill.buffer.database import Database, sqlite_url

    return SqlStore(Database(config.url or sqlite_url(run_dir / DATABASE_FILE)), run_id)


def open_run_store(run_dir: Path, *, read_only: bool = True) -> SqlStore:
    """Open the database of a run directory: `buffer.url` of its config.yaml, else RUN/buffer.sqlite.

    Raises:
        ConfigError: `run_dir` holds no run, or its buffer is in memory.
        StoreError: the database cannot be opened or does not have the run.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no run (no config.yaml); give the directory that `rollmill run` printed")
    if database_url(run_dir) is None and not (run_dir / DATABASE_FILE).is_file():
        raise ConfigError(
            f"{run_dir} has no {DATABASE_FILE}: the run keeps its experiences in memory, and in RUN/rollouts "
            "(`rollmill show`); set buffer.store: sql to keep them in a database"
        )
    return create_run_store(run_dir, read_only=read_only)


def create_run_store(run_dir: Path, *, read_only: bool = False) -> SqlStore:
    """Like `open_run_store`, but creates a missing database, unless `read_only`."""
    from rollmill.buffer.database import Database, sqlite_url

    run_id = _run_id(run_dir / "machine.json")
    database = Database(database_url(run_dir) or sqlite_url(run_dir / DATABASE_FILE), read_only=read_only)
    try:
        return SqlStore(database, run_id)
    except BaseException:
        database.close()
        raise


def database_url(run_dir: Path) -> str | None:
    """`buffer.url` in a run's config.yaml; None if no stage sets it. Raises ConfigError if the file is damaged."""
    urls = (section.get("url") for section in _sections(run_dir))
    return next((str(url) for url in urls if url is not None), None)


def replay_capacity(run_dir: Path) -> int:
    """Largest replay capacity, in groups, of the run's stages; 0 without replay."""
    rules = [section.get("replay") for section in _sections(run_dir)]
    standard = ReplayConfig.model_fields["capacity"].default
    return max((rule.get("capacity", standard) for rule in rules if rule is not None), default=0)


def _sections(run_dir: Path) -> list[dict[str, Any]]:
    """The sections `buffer` of a resolved run file; empty if there is no file."""
    path = run_dir / "config.yaml"
    try:
        config = read_plain_yaml(path) if path.is_file() else {}
        return [part.get("buffer") or {} for part in (config, *(config.get("stages") or []))]
    except (ConfigError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}; put the file back") from error


def _run_id(machine: Path) -> str:
    try:
        return str(read_json_object(machine)["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{machine} does not say the run's id, by which its rows are found; put the file back, or start or resume "
            "the run"
        ) from error


__all__ = [
    "DemonstrationPool",
    "ExperienceKind",
    "ExperienceStore",
    "Group",
    "GroupQueue",
    "open_run_store",
    "open_store",
]
