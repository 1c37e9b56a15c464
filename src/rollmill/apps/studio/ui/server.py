"""Builds the server of `rollmill ui`. Importing it needs no web library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.apps.serve.web import ConnectionLimits
from rollmill.apps.serve.web.guard import RequestGuard
from rollmill.apps.studio.ui.catalog import RunCatalog
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

_LAST_ANSWERS_S = 2


@contextmanager
def open_server(folder: Path, guard: RequestGuard, author: str) -> Iterator[uvicorn.Server]:
    """Yields the server for the runs in a folder, with `run(sockets=[...])` until SIGINT or SIGTERM.

    Args:
        author: of feedback.

    Its temporary files are removed at the end. Raises ConfigError if `folder` is no folder, or if the web libraries are
    missing.
    """
    try:
        import uvicorn

        from rollmill.apps.serve.web.connections import server_config
        from rollmill.apps.studio.ui.app import RunViews, make_app
    except ImportError as error:
        raise ConfigError(
            "`rollmill ui` needs the fastapi and uvicorn libraries: pip install 'rollmill[ui]'"
        ) from error
    catalog = RunCatalog(folder)
    with (
        tempfile.TemporaryDirectory(prefix="rollmill-ui-") as tables,
        closing(RunViews(catalog, Path(tables), author)) as views,
    ):
        app = make_app(views, guard)
        yield uvicorn.Server(server_config(app, ConnectionLimits(keep_alive_s=30), _LAST_ANSWERS_S))
