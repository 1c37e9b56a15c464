"""The web application of `rollmill feedback`: a JSON API for programs, and the pages."""

from __future__ import annotations

import json
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.guard import RequestGuard
from rollmill.apps.serve.web.middleware import BODY_S
from rollmill.apps.serve.web.page_middleware import PageMiddleware
from rollmill.apps.studio.feedback.pages import FeedbackPages
from rollmill.apps.studio.feedback.requests import FeedbackError, parse_author, parse_request
from rollmill.apps.studio.feedback.requests import FeedbackRequest as Feedback
from rollmill.apps.studio.feedback.service import FeedbackService
from rollmill.errors import RollmillError
from rollmill.files import to_jsonable

MAX_BODY = 8 * 2**20
_MOST_AT_ONCE, _MOST_LISTED = 1000, 1000


def make_app(service: FeedbackService, guard: RequestGuard, author: str, body_s: float = BODY_S) -> PageMiddleware:
    """Builds the application for one run. `author` is the default name of the page's user."""
    app = FastAPI(title="rollmill feedback", openapi_url=None)
    pages = FeedbackPages(service, guard, author)

    _add_errors(app, pages)
    _add_api(app, service)
    pages.add_to(app)
    return PageMiddleware(app, guard, _is_program, most_bytes=MAX_BODY, body_s=body_s)


def _add_errors(app: FastAPI, pages: FeedbackPages) -> None:
    """Registers error handlers: JSON for programs, a page for people."""

    def _refusal(request: Request, status: int, message: str) -> Response:
        if _is_program(request):
            return JSONResponse({"error": message}, status_code=status)
        return pages.error(request, message, status)

    @app.exception_handler(RollmillError)
    async def failed(request: Request, error: RollmillError) -> Response:
        return _refusal(request, error.status if isinstance(error, RequestRefusedError) else 500, str(error))

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        message = "there is no such page" if error.status_code == 404 else str(error.detail)
        return _refusal(request, error.status_code, message)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()]
        return _refusal(request, 422, "; ".join(wrong))


def _add_api(app: FastAPI, service: FeedbackService) -> None:
    """Registers the JSON API."""

    watching = CapacityLimiter(2)  # threads of its own: others may all be busy with long requests

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Reports that the server works, and its run."""
        steps = await run_sync(service.stored.steps, limiter=watching)
        return {"status": "ok", "run": service.stored.run_dir.name, "steps": len(steps)}

    @app.post("/feedback")
    async def post(request: Request) -> dict[str, Any]:
        """Submits feedback: one JSON object, or a list that is applied as a whole."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise FeedbackError("send Content-Type: application/json", status=415)
        body, key = await request.body(), request.headers.get("idempotency-key")
        done = await run_in_threadpool(lambda: service.submit(_requests(body, key)))
        return {"ids": done.ids, "new": done.new}

    @app.get("/feedback")
    def listed(offset: int = 0, limit: int = 100, author: str | None = None) -> JSONResponse:
        """Lists all feedback, oldest first; `next` is the offset of the next page, or null."""
        if offset < 0 or not 1 <= limit <= _MOST_LISTED:
            raise FeedbackError(f"offset is 0 or more, limit 1 to {_MOST_LISTED}")
        acts = [act for act in service.acts.all() if author in (None, act.author)]
        page = [act.as_json() for act in acts[offset : offset + limit]]
        more = offset + limit if offset + limit < len(acts) else None
        return JSONResponse({"acts": to_jsonable(page), "next": more, "total": len(acts)})

    @app.delete("/feedback/{id}")
    def undo(id: str, author: str) -> dict[str, Any]:
        """Undoes feedback; `author` is the person or application that undoes it."""
        if not service.undo(id, parse_author(author)):
            raise FeedbackError(f"{id} was undone before", status=409)
        return {"id": id, "undone_by": author}


def _is_program(request: Request) -> bool:
    return request.url.path.startswith(("/feedback", "/health")) or "text/html" not in request.headers.get("accept", "")


def _requests(body: bytes, key: str | None) -> list[Feedback]:
    try:
        rows = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FeedbackError(f"the body is not JSON: {error}") from error
    many = isinstance(rows, list)
    rows = rows if many else [rows]
    if not 1 <= len(rows) <= _MOST_AT_ONCE:
        raise FeedbackError(f"expected a list of 1 to {_MOST_AT_ONCE} requests, found {len(rows)}")
    requests = []
    for number, row in enumerate(rows):
        if key is not None and isinstance(row, dict):
            row = {"key": f"{key} {number}" if many else key} | row
        requests.append(parse_request(row, f"request {number + 1} of {len(rows)}: " if many else ""))
    return requests
