"""From a run directory to a server that people and programs reach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.buffer.build import create_run_store
from rollmill.errors import ConfigError
from rollmill.feedback.guard import RequestGuard
from rollmill.feedback.service import FeedbackService
from rollmill.trackers.rollout_log import check_run_dir

if TYPE_CHECKING:
    import uvicorn

_LAST_ANSWERS_S = 5


def open_feedback(run_dir: Path) -> FeedbackService:
    """The desk of a run; its database is made if the run has none (one whose buffer is in memory reads feedback there).

    Raises:
        ConfigError: `run_dir` holds no run.
        ModelError: the run has stored no tokenizer.
        StoreError: the database cannot be opened.
    """
    return FeedbackService(run_dir, create_run_store(check_run_dir(run_dir)))


def build_server(desk: FeedbackService, guard: RequestGuard, author: str) -> uvicorn.Server:
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
