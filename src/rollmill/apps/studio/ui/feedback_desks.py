"""Feedback on completions from the page of a completion: the same as that of `rollmill feedback`.

Its modules are imported when there is feedback, since they import much else.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.studio.ui.catalog import RunCatalog

if TYPE_CHECKING:
    from rollmill.apps.studio.feedback.service import FeedbackService

_DATABASE = "buffer.sqlite"


class FeedbackDesks:
    """The feedback of the runs that are looked at. A run's database is opened when there is something to read,
    and created when something is said.

    Args:
        author: of all feedback.
    """

    def __init__(self, catalog: RunCatalog, author: str) -> None:
        self._catalog, self._author = catalog, author
        self._lock = threading.Lock()
        self._services: dict[Path, FeedbackService] = {}

    def said(self, run_dir: Path, completion: str) -> dict[str, Any]:
        """List what was said about a completion and not undone, oldest first."""
        known = run_dir in self._services or (run_dir / _DATABASE).is_file()
        acts = self._service(run_dir).acts.all() if known else []
        shown = [act.as_json() for act in acts if completion in act.of and act.undone_by is None]
        return {"author": self._author, "said": shown}

    def say(self, run_dir: Path, body: bytes) -> dict[str, Any]:
        """Store a rating or a better answer: `{completion, step, rating}` or `{completion, step, text}`."""
        from rollmill.apps.studio.feedback.requests import parse_request

        try:
            row = json.loads(body)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise RequestRefusedError("send a JSON object", 422, code="no_object")
        done = self._service(run_dir).submit([parse_request(row | {"author": self._author})])
        return {"ids": done.ids}

    def undo(self, run_dir: Path, id: str) -> dict[str, Any]:
        """Take back what was said."""
        self._service(run_dir).undo(id, self._author)
        return {"id": id}

    def close(self) -> None:
        with self._lock:
            for service in self._services.values():
                service.close()
            self._services.clear()

    def _service(self, run_dir: Path) -> FeedbackService:
        from rollmill.apps.studio.feedback.server import open_feedback

        with self._lock:
            found = self._services.get(run_dir)
            if found is None:
                self._catalog.check_links([run_dir / _DATABASE])
                found = self._services[run_dir] = open_feedback(run_dir)
            return found
