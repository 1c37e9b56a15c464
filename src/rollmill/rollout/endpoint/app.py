"""The web application and its server: OpenAI's API for applications, and feedback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollmill.errors import ConfigError, EngineError, RollmillError
from rollmill.rollout.endpoint import protocol as responses
from rollmill.rollout.endpoint.chat_completions import ChatCompletionHandler, TextCompletionHandler
from rollmill.rollout.endpoint.middleware import SESSION_SCOPE_KEY, AccessRules, EndpointMiddleware
from rollmill.rollout.endpoint.protocol import (
    ApiError,
    ChatCompletionRequest,
    CommitRequest,
    CompletionRequest,
    ErrorResponse,
    RewardRequest,
)
from rollmill.rollout.endpoint.service import MISSING_LIBRARIES, EndpointService

AnswerT = TypeVar("AnswerT")

_ABOUT = """OpenAI's interface to a model that learns. Calls are recorded by session: the API key is `KEY:SESSION`, or
the header `X-Session-Id` names it, or the path begins with `/s/SESSION`. A call without a session is one of its own."""
_FAILS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; the message says what to do."},
    "5XX": {"model": ErrorResponse, "description": "The request failed, or the server is ending."},
}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "JSON, or its pieces."}
}


def make_app(service: EndpointService, rules: AccessRules) -> EndpointMiddleware:
    """Build the application, behind its access rules."""
    app = FastAPI(title="rollmill serve", description=_ABOUT, docs_url=None, redoc_url=None, responses=_FAILS)
    _add_errors(app)
    _add_completions(app, service)
    _add_state(app, service)
    _add_feedback(app, service)
    return EndpointMiddleware(app, rules, service.gauges)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(RollmillError)
    async def failed(request: Request, error: RollmillError) -> Response:
        return JSONResponse(ApiError(str(error), 500, code="failed").body(), 500)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        known = ApiError("the server has failed of this request; its log says why", 500, code="failed")
        return JSONResponse(known.body(), 500)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        found = {404: "there is no such path; see /openapi.json", 405: "this path takes another method"}
        text = found.get(error.status_code, str(error.detail))
        known = ApiError(text, error.status_code, code="not_found" if error.status_code == 404 else "invalid_request")
        return JSONResponse(known.body(), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = [f"{_place(each['loc'])}: {each['msg']}" for each in error.errors()[:5]]
        known = ApiError("; ".join(wrong), code="invalid_request", param=_place(error.errors()[0]["loc"]))
        return JSONResponse(known.body(), 400)


def _place(at: Any) -> str:
    """Location of an error in the body; names made up by the client are not repeated."""
    return ".".join(str(each) for each in at[1:] if isinstance(each, int) or str(each).isidentifier())[:100] or "body"


def _add_completions(app: FastAPI, service: EndpointService) -> None:
    @app.post("/v1/chat/completions", response_model=responses.ChatCompletionResponse, responses=_STREAMS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next turn of a conversation."""
        return await _answered(ChatCompletionHandler(service, body, request.scope[SESSION_SCOPE_KEY]), request)

    @app.post("/v1/completions", response_model=responses.CompletionResponse, responses=_STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a text."""
        return await _answered(TextCompletionHandler(service, body, request.scope[SESSION_SCOPE_KEY]), request)


async def _answered(work: ChatCompletionHandler | TextCompletionHandler, request: Request) -> Response:
    """Respond to an admitted request, at once or as a stream."""
    if work.body.stream:
        return _EventStreamResponse(work)
    try:
        found = await _while_connected(work.answer(), request)
    finally:
        work.close()
    return JSONResponse(found.model_dump(exclude_none=False))


class _EventStreamResponse(StreamingResponse):
    """Server-sent events. Generation is cancelled when the client disconnects, even before the first event."""

    def __init__(self, work: ChatCompletionHandler | TextCompletionHandler) -> None:
        super().__init__(_events(work), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _events(work: ChatCompletionHandler | TextCompletionHandler) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        work.close()  # before the client sees the end: it may commit at once
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield b"data: " + json.dumps(error.body()).encode() + b"\n\n"


async def _while_connected(work: Awaitable[AnswerT], request: Request) -> AnswerT:
    """Return the result of `work`; it is cancelled when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client went away", 499, code="client_gone")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_state(app: FastAPI, service: EndpointService) -> None:
    def card() -> responses.ModelCard:
        version = service.engine.version
        return responses.ModelCard(
            id=service.name, created=service.created, max_model_len=service.context, weights_version=version
        )

    @app.get("/v1/models", response_model=responses.ModelList)
    async def models() -> responses.ModelList:
        """List the served model; requests may name any."""
        return responses.ModelList(data=[card()])

    @app.get("/v1/models/{id:path}", response_model=responses.ModelCard)
    async def model(id: str) -> responses.ModelCard:
        """Describe one model."""
        if id != service.name:
            raise ApiError(f"there is no such model; `{service.name}` is served", 404, code="model_not_found")
        return card()

    @app.get("/health", response_model=responses.HealthResponse)
    async def health() -> Response:
        """True if the server answers requests; 503 if not."""
        gate = service.gate
        found = responses.HealthResponse(
            status="ending" if gate.closing else "failed" if gate.failure else "ok",
            model=service.name,
            weights_version=service.engine.version,
            under_way=gate.under_way,
            sessions=len(service.sessions),
            message=gate.failure or None,
        )
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        service.gauges.version.set(service.engine.version)
        return Response(service.gauges.text(), media_type="text/plain; version=0.0.4")


def _add_feedback(app: FastAPI, service: EndpointService) -> None:
    @app.post("/feedback", response_model=responses.FeedbackResponse)
    async def feedback(body: RewardRequest, request: Request) -> responses.FeedbackResponse:
        """Set the reward of a session. Repeating it changes nothing."""
        if not service.takes_feedback:
            raise ApiError(
                "nothing is recorded here; start `rollmill serve` with --record or --train", code="no_feedback"
            )
        name = body.session or (request.scope[SESSION_SCOPE_KEY] if body.completion is None else None)
        session = service.sessions.find(name=name, answer=body.completion)
        session.rewarded(body.reward)
        service.gauges.feedback.inc()
        if body.commit:
            _commit(service, [session])
        assert session.reward is not None
        return responses.FeedbackResponse(
            session=session.id, reward=session.reward, parts=session.parts, committed=body.commit
        )

    @app.post("/commit", response_model=responses.CommitResponse)
    async def commit(body: CommitRequest, request: Request) -> responses.CommitResponse:
        """Hand over finished sessions, all or none."""
        single = [body.session] if body.session is not None else []
        names = list(dict.fromkeys([*single, *(body.sessions or [])]))
        if not names and body.sessions is None and request.scope[SESSION_SCOPE_KEY] is not None:
            names = [request.scope[SESSION_SCOPE_KEY]]
        sessions = service.sessions
        chosen = [sessions.find(name=name) for name in names]
        if not names and body.sessions is None:
            chosen = sessions.rewarded()
        count = _commit(service, chosen)
        return responses.CommitResponse(committed=[session.id for session in chosen], experiences=count)


def _commit(service: EndpointService, sessions: list[Any]) -> int:
    if service.sink is None:
        text = "nothing is committed here: a workflow ends its sessions itself, and a server needs --record or --train"
        raise ApiError(text, code="no_commit")
    return service.sessions.commit(sessions, service.sink, service.chat.decode)


SHUTDOWN_GRACE_S = 30


class EndpointServer:
    """Runs the application in the caller's event loop, from `start` to `stop`. Signals are left to the caller.

    Raises ConfigError if the web libraries are missing.
    """

    def __init__(self, service: EndpointService, rules: AccessRules, listener: socket.socket) -> None:
        try:
            import uvicorn

            from rollmill.rollout.endpoint.app import make_app
        except ImportError as error:
            raise ConfigError(MISSING_LIBRARIES) from error

        class _Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        options |= {"lifespan": "off", "ws": "none", "timeout_keep_alive": 120}
        config = uvicorn.Config(make_app(service, rules), **options, timeout_graceful_shutdown=SHUTDOWN_GRACE_S)
        self.service, self._listener = service, listener
        self._server: Any = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start answering requests."""
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                raise EngineError("the endpoint did not start") from self._task.exception()
            await asyncio.sleep(0.005)

    async def stop(self, *, abort: bool = False) -> None:
        """Refuse new requests, and stop once running ones are answered, or at once with `abort`."""
        if self._task is None:
            return
        self.service.gate.closing = True
        if abort:
            await self.service.gate.abort()
        self._server.should_exit = True
        await self._task
        self._task = None
