"""From a run directory to a server that people and programs reach."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.buffer.build import FILE, url_of
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore
from rollmill.core.errors import ConfigError, StoreError
from rollmill.feedback.desk import Desk
from rollmill.feedback.guard import Guard
from rollmill.monitor.rollouts import check_run_dir

if TYPE_CHECKING:
    import uvicorn


def open_desk(run_dir: Path) -> Desk:
    """The desk of a run; its database is made if the run has none (one whose buffer is in memory reads feedback there).

    Raises:
        ConfigError: `run_dir` holds no run.
        ModelError: the run has stored no tokenizer.
        StoreError: the database cannot be opened.
    """
    config, machine = check_run_dir(run_dir) / "config.yaml", run_dir / "machine.json"
    url = url_of(run_dir) if config.is_file() else None
    run_id = json.loads(machine.read_text()).get("run_id") if machine.is_file() else None
    if run_id is None:
        raise StoreError(f"{machine} does not say the run's id, by which its rows are found; start or resume the run")
    return Desk(run_dir, SqlStore(Database(url or sqlite_url(run_dir / FILE)), run_id))


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one. Raises ConfigError where that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; give another --port (0: any)") from error


def make_server(desk: Desk, guard: Guard, author: str) -> uvicorn.Server:
    """What answers requests, with `run(sockets=[...])` until SIGINT or SIGTERM.

    Raises ConfigError where the web libraries are missing.
    """
    try:
        import uvicorn

        from rollmill.feedback.app import make_app
    except ImportError as error:
        raise ConfigError(
            "`rollmill feedback` needs the fastapi and uvicorn libraries: pip install 'rollmill[feedback]'"
        ) from error
    app = make_app(desk, guard, author)
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none")
    )
