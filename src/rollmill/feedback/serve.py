"""From a run directory to a server that people and programs reach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.buffer.build import run_store
from rollmill.core.errors import ConfigError
from rollmill.feedback.desk import Desk
from rollmill.feedback.guard import Guard
from rollmill.monitor.rollouts import check_run_dir

if TYPE_CHECKING:
    import uvicorn

_LAST_ANSWERS_S = 5


def open_desk(run_dir: Path) -> Desk:
    """The desk of a run; its database is made if the run has none (one whose buffer is in memory reads feedback there).

    Raises:
        ConfigError: `run_dir` holds no run.
        ModelError: the run has stored no tokenizer.
        StoreError: the database cannot be opened.
    """
    return Desk(run_dir, run_store(check_run_dir(run_dir)))


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
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    return uvicorn.Server(
        uvicorn.Config(app, **quiet, lifespan="off", ws="none", timeout_graceful_shutdown=_LAST_ANSWERS_S)
    )
