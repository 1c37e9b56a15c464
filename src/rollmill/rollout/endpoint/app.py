"""The web application and its server: OpenAI's API for applications, and feedback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollmill.errors import RollmillError
from rollmill.rollout.endpoint import protocol as responses
from rollmill.rollout.endpoint.chat_completions import ChatCompletionHandler, TextCompletionHandler
from rollmill.rollout.endpoint.middleware import AccessRules, EndpointMiddleware, caller_of
from rollmill.rollout.endpoint.protocol import (
    ApiError,
    ChatCompletionRequest,
    CommitRequest,
    CompletionRequest,
    ErrorResponse,
    RewardRequest,
)
from rollmill.rollout.endpoint.service import EndpointService
from rollmill.web import RequestRefusedError

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
    app.router.route_class = _threaded_route(service)
    _add_errors(app)
    _add_completions(app, service)
    _add_state(app, service)
    _add_feedback(app, service)
    assert service.most_bytes is not None
    return EndpointMiddleware(app, rules, service.gauges, service.rates, service.most_bytes)


def _threaded_route(service: EndpointService) -> type[APIRoute]:
    """A route that parses and validates a long JSON body in a thread, so that other requests are answered meanwhile."""

    class _ThreadedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            model: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
            if model is None:
                return super().get_route_handler()

            async def handle(request: Request) -> Response:
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError("send Content-Type: application/json", code="invalid_request")
                raw = await request.body()
                body = await service.converted(len(raw), lambda: _parsed(model, raw))
                found = await self.endpoint(body=body, request=request)
                return found if isinstance(found, Response) else JSONResponse(found.model_dump())

            return handle

    return _ThreadedRoute


def _parsed(model: type[BaseModel], raw: bytes) -> BaseModel:
    """Parse a body. Raises ApiError that names up to five wrong fields."""
    try:
        return model.model_validate(json.loads(raw))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[:5]
        text = "; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in wrong)
        raise ApiError(text, code="invalid_request", param=_place(wrong[0]["loc"])) from None
    except (ValueError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not JSON: {text}", code="invalid_request") from None


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestRefusedError)
    async def refused(request: Request, error: RequestRefusedError) -> Response:
        return JSONResponse(ApiError.of(error).body(), error.status, error.headers())

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
        first = error.errors()[0]
        known = ApiError(f"{_place(first['loc'][1:])}: {first['msg']}", code="invalid_request")
        return JSONResponse(known.body(), 400)


def _place(at: Any) -> str:
    """Location of an error in the body; names made up by the client are not repeated."""
    return ".".join(str(each) for each in at if isinstance(each, int) or str(each).isidentifier())[:100] or "body"


def _add_completions(app: FastAPI, service: EndpointService) -> None:
    @app.post("/v1/chat/completions", response_model=responses.ChatCompletionResponse, responses=_STREAMS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next turn of a conversation."""
        size = len(await request.body())
        return await _answered(ChatCompletionHandler(service, body, caller_of(request.scope), size), request)

    @app.post("/v1/completions", response_model=responses.CompletionResponse, responses=_STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a text."""
        size = len(await request.body())
        return await _answered(TextCompletionHandler(service, body, caller_of(request.scope), size), request)


async def _answered(work: ChatCompletionHandler | TextCompletionHandler, request: Request) -> Response:
    """Respond to an admitted request, at once or as a stream."""

    async def whole() -> Response:
        await work.begin()
        return await work.answer()

    try:
        if work.body.stream:
            await _while_connected(work.begin(), request)
            return _EventStreamResponse(work)
        found = await _while_connected(whole(), request)
    except BaseException:
        work.close()
        raise
    work.close()
    return found


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
        caller = caller_of(request.scope)
        name = body.session or (caller.session if body.completion is None else None)
        session = service.sessions.find(caller.client, name=name, answer=body.completion)
        session.rewarded(body.reward)
        service.gauges.feedback.inc()
        if body.commit:
            await _commit(service, [session])
        assert session.reward is not None
        return responses.FeedbackResponse(
            session=session.id, reward=session.reward, parts=session.parts, committed=body.commit
        )

    @app.post("/commit", response_model=responses.CommitResponse)
    async def commit(body: CommitRequest, request: Request) -> responses.CommitResponse:
        """Hand over finished sessions, all or none."""
        caller = caller_of(request.scope)
        single = [body.session] if body.session is not None else []
        names = list(dict.fromkeys([*single, *(body.sessions or [])]))
        if not names and body.sessions is None and caller.session is not None:
            names = [caller.session]
        sessions = service.sessions
        chosen = [sessions.find(caller.client, name=name) for name in names]
        if not names and body.sessions is None:
            chosen = sessions.rewarded(caller.client)
        count = await _commit(service, chosen)
        return responses.CommitResponse(committed=[session.id for session in chosen], experiences=count)


async def _commit(service: EndpointService, sessions: list[Any]) -> int:
    if service.sink is None:
        text = "nothing is committed here: a workflow ends its sessions itself, and a server needs --record or --train"
        raise ApiError(text, code="no_commit")
    return await service.sessions.commit(sessions, service.sink, service.chat.decode)
