"""The web application and its server: OpenAI's and Anthropic's API for applications, and feedback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollmill.apps.serve.endpoint import protocol as responses
from rollmill.apps.serve.endpoint.anthropic_messages import MessagesHandler, count_tokens
from rollmill.apps.serve.endpoint.anthropic_protocol import (
    MessageResponse,
    MessagesRequest,
    TokenCount,
    TokenCountRequest,
)
from rollmill.apps.serve.endpoint.chat_completions import ChatCompletionHandler, TextCompletionHandler
from rollmill.apps.serve.endpoint.handler import CompletionHandler
from rollmill.apps.serve.endpoint.middleware import AccessRules, EndpointMiddleware, caller_of
from rollmill.apps.serve.endpoint.protocol import (
    ApiError,
    ChatCompletionRequest,
    CommitRequest,
    CompletionRequest,
    ErrorResponse,
    RewardRequest,
)
from rollmill.apps.serve.endpoint.responses import ResponseHandler, forget_response, stored_response
from rollmill.apps.serve.endpoint.responses_protocol import DeletedResponse, ResponseObject, ResponseRequest
from rollmill.apps.serve.endpoint.service import EndpointService
from rollmill.apps.serve.web import RequestRefusedError
from rollmill.errors import RollmillError

AnswerT = TypeVar("AnswerT")
AnyHandler = CompletionHandler[Any, Any]

_ABOUT = """The interfaces of OpenAI and Anthropic to a model that learns. Calls are recorded by session: the API key is
`KEY:SESSION`, or the header `X-Session-Id` names it, or the path begins with `/s/SESSION`. A call without a session is
one of its own."""
_FAILS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; the message says what to do."},
    "5XX": {"model": ErrorResponse, "description": "The request failed, or the server is ending."},
}
_ANTHROPIC_FAILS = {status: each | {"model": responses.AnthropicErrorResponse} for status, each in _FAILS.items()}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""Schema of each server-sent event; its data is JSON, or the end mark of the protocol."""
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}, "description": "JSON, or its pieces as events."}
}


def make_app(service: EndpointService, rules: AccessRules) -> EndpointMiddleware:
    """Build the application, behind its access rules."""
    app = FastAPI(title="rollmill serve", description=_ABOUT, docs_url=None, redoc_url=None, responses=_FAILS)
    app.router.route_class = _threaded_route(service)
    add_errors(app)
    _add_completions(app, service)
    _add_messages(app, service)
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
                body = await service.converted(len(raw), lambda: parse_body(model, raw))
                found = await self.endpoint(body=body, request=request)
                return found if isinstance(found, Response) else JSONResponse(found.model_dump())

            return handle

    return _ThreadedRoute


def parse_body(model: type[BaseModel], raw: bytes) -> BaseModel:
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


def add_errors(app: FastAPI) -> None:
    """Answer requests that are refused or fail in the format of the protocol that their path belongs to."""

    @app.exception_handler(RequestRefusedError)
    async def refused(request: Request, error: RequestRefusedError) -> Response:
        return _refusal(request, ApiError.of(error))

    @app.exception_handler(RollmillError)
    async def failed(request: Request, error: RollmillError) -> Response:
        return _refusal(request, ApiError(str(error), 500, code="failed"))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _refusal(
            request, ApiError("the server has failed of this request; its log says why", 500, code="failed")
        )

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        found = {404: "there is no such path; see /openapi.json", 405: "this path takes another method"}
        text = found.get(error.status_code, str(error.detail))
        code = "not_found" if error.status_code == 404 else "invalid_request"
        return _refusal(request, ApiError(text, error.status_code, code=code), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refusal(request, ApiError(f"{_place(first['loc'][1:])}: {first['msg']}", code="invalid_request"))


def _refusal(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    body = error.body(request.scope["path"])
    return JSONResponse(body, error.status, error.headers() if headers is None else headers)


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

    @app.post("/v1/responses", response_model=ResponseObject, responses=_STREAMS)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Generate the next turn of a conversation, which may continue an earlier response."""
        size = len(await request.body())
        return await _answered(ResponseHandler(service, body, caller_of(request.scope), size), request)

    @app.get("/v1/responses/{id}", response_model=ResponseObject)
    async def read_response(id: str, request: Request, stream: bool = False) -> Response:
        """Return a response that the server holds, without log-probs."""
        if stream:
            raise ApiError("a response that has ended is not streamed", code="unsupported_parameter", param="stream")
        return Response(stored_response(service, id, caller_of(request.scope)), media_type="application/json")

    @app.delete("/v1/responses/{id}", response_model=DeletedResponse)
    async def delete_response(id: str, request: Request) -> DeletedResponse:
        """Give up a response; what its session has recorded stays."""
        forget_response(service, id, caller_of(request.scope))
        return DeletedResponse(id=id)


def _add_messages(app: FastAPI, service: EndpointService) -> None:
    @app.post("/v1/messages", response_model=MessageResponse, responses=_STREAMS | _ANTHROPIC_FAILS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Generate the next turn of a conversation, in Anthropic's protocol."""
        size = len(await request.body())
        return await _answered(MessagesHandler(service, body, caller_of(request.scope), size), request)

    @app.post("/v1/messages/count_tokens", response_model=TokenCount, responses=_ANTHROPIC_FAILS)
    async def tokens(body: TokenCountRequest, request: Request) -> TokenCount:
        """Count the tokens of a prompt in Anthropic's protocol."""
        return await count_tokens(service, body, len(await request.body()))


async def _answered(work: AnyHandler, request: Request) -> Response:
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

    def __init__(self, work: AnyHandler) -> None:
        super().__init__(_events(work), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _events(work: AnyHandler) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                yield _event(work, chunk)
        work.close()  # before the client sees the end: it may commit at once
        last = work.last_event()
        yield b"data: [DONE]\n\n" if last is None else _event(work, last)
    except ApiError as error:
        yield _event(work, work.error_event(error))


def _event(work: AnyHandler, data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n" if work.named_events else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


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
