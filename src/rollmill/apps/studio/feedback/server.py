"""Opens the feedback of a run, and its server. Importing it needs no web library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.apps.serve.web import ConnectionLimits
from rollmill.apps.serve.web.guard import RequestGuard
from rollmill.apps.serve.web.middleware import BODY_S
from rollmill.apps.studio.feedback.service import FeedbackService
from rollmill.buffer import create_run_store
from rollmill.errors import ConfigError
from rollmill.trackers.rollout_log import check_run_dir

if TYPE_CHECKING:
    import uvicorn

_LAST_ANSWERS_S = 5


def open_feedback(run_dir: Path) -> FeedbackService:
    """Opens the feedback service of a run. Its database is created if the run has none (a run with its buffer in memory
    reads feedback there).

    Raises:
        ConfigError: `run_dir` holds no run.
        ModelError: the run has no stored tokenizer.
        StoreError: the database cannot be opened.
    """
    return FeedbackService(run_dir, create_run_store(check_run_dir(run_dir)))


def build_server(
    service: FeedbackService,
    guard: RequestGuard,
    author: str,
    *,
    connections: ConnectionLimits = ConnectionLimits(keep_alive_s=5),
    body_s: float = BODY_S,
) -> uvicorn.Server:
    """Builds the server, with `run(sockets=[...])` until SIGINT or SIGTERM.

    Args:
        body_s: seconds for a whole body to arrive.

    Raises ConfigError if the web libraries are missing.
    """
    try:
        import uvicorn

        from rollmill.apps.serve.web.connections import server_config
        from rollmill.apps.studio.feedback.app import make_app
    except ImportError as error:
        raise ConfigError(
            "`rollmill feedback` needs the fastapi and uvicorn libraries: pip install 'rollmill[feedback]'"
        ) from error
    app = make_app(service, guard, author, body_s)
    return uvicorn.Server(server_config(app, connections, _LAST_ANSWERS_S))
