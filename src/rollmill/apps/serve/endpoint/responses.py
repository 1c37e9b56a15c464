"""Handler of /v1/responses: a chat request of OpenAI's newer interface, where the server remembers conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rollmill.apps.serve.endpoint.chat_completions import ChatChoiceState, ChatCompletionHandler
from rollmill.apps.serve.endpoint.extra_fields import check_extra_fields
from rollmill.apps.serve.endpoint.middleware import Caller
from rollmill.apps.serve.endpoint.protocol import ApiError, ChatMessageParam
from rollmill.apps.serve.endpoint.reply_stream import TextDelta
from rollmill.apps.serve.endpoint.responses_protocol import ResponseObject, ResponseRequest, ResponseUsageInfo
from rollmill.apps.serve.endpoint.service import EndpointService
from rollmill.apps.serve.endpoint.session import EndpointSession, StoredResponse
from rollmill.types import Completion


class ResponseHandler(ChatCompletionHandler):
    """A running request of /v1/responses. Raises ApiError if it cannot be answered.

    A response that continues another one belongs to the same session.
    """

    kind = "resp"
    named_events = True

    def __init__(self, service: EndpointService, body: ResponseRequest, caller: Caller, size: int) -> None:
        check_extra_fields(body.model_extra)
        self.asked, self._events = body, 0
        self.continuable = body.store is not False
        before: tuple[ChatMessageParam, ...] = ()
        if body.previous_response_id is not None:
            before, caller = _continued(service, body.previous_response_id, caller)
        chat = body.chat_request(before)
        self._messages = tuple(chat.messages if body.instructions is None else chat.messages[1:])
        super().__init__(service, chat, caller, size)

    def response(self) -> ResponseObject:  # type: ignore[override]  # another protocol
        [choice] = self.choices
        return self._object(choice)

    def last_event(self) -> dict[str, Any]:
        [choice] = self.choices
        made = self._object(choice)
        return self._event(f"response.{made.status}", response=made.model_dump())

    def error_event(self, error: ApiError) -> dict[str, Any]:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        [choice] = self.choices
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object(choice).model_dump())
        thought: dict[str, Any] = {"item_id": self._id("rs"), "output_index": 0, "content_index": 0}
        thinks = says = False
        logprobs = list[Any]()
        async with aclosing(self._changes()) as changes:
            async for _, new in changes:
                if new.reasoning:
                    if not thinks:
                        item = self._reasoning_item("", "in_progress") | {"content": []}
                        yield self._event("response.output_item.added", output_index=0, item=item)
                    thinks = True
                    yield self._event("response.reasoning_text.delta", **thought, delta=new.reasoning)
                plain = choice.completion is not None and not (choice.calls or thinks)
                if not says and (new.content or plain):
                    if thinks:
                        for event in self._end_of_reasoning(choice, "completed", thought):
                            yield event
                    says = True
                    item, part = self._message_item("", [], "in_progress"), {"output_index": int(thinks)}
                    part |= {"content_index": 0, "item_id": item["id"]}
                    at = {"output_index": int(thinks)}
                    yield self._event("response.output_item.added", **at, item=item | {"content": []})
                    yield self._event("response.content_part.added", **part, part=item["content"][0])
                if new.content:
                    logged = self._logprob_list(choice)
                    logprobs += logged
                    yield self._event("response.output_text.delta", **part, delta=new.content, logprobs=logged)
        if says:
            logprobs += self._logprob_list(choice)
            item = self._message_item(choice.content, logprobs, self._status(choice))
            done = {"text": choice.content, "logprobs": logprobs}
            yield self._event("response.output_text.done", **part, **done)
            yield self._event("response.content_part.done", **part, part=item["content"][0])
            yield self._event("response.output_item.done", output_index=int(thinks), item=item)
        elif thinks:
            for event in self._end_of_reasoning(choice, self._status(choice), thought):
                yield event
        for index, call in enumerate(self._call_items(choice), start=thinks + says):
            at = {"output_index": index}
            yield self._event(
                "response.output_item.added", **at, item=call | {"arguments": "", "status": "in_progress"}
            )
            at["item_id"], arguments = call["id"], call["arguments"]
            yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
            yield self._event("response.function_call_arguments.done", **at, arguments=arguments, name=call["name"])
            yield self._event("response.output_item.done", output_index=index, item=call)

    def _end_of_reasoning(self, choice: ChatChoiceState, status: str, at: dict[str, Any]) -> list[dict[str, Any]]:
        item = self._reasoning_item(choice.reasoning, status)
        return [
            self._event("response.reasoning_text.done", **at, text=choice.reasoning),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _ended(self, choice: ChatChoiceState, completion: Completion) -> TextDelta:
        rest = super()._ended(choice, completion)
        if self.continuable and not self.session.closed:
            answer = self._answer_message(choice)
            body = self._object(choice, logprobs=False).model_dump_json().encode()
            self.session.keep_response(self.id, StoredResponse((*self._messages, answer), body))
        return rest

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": type, "sequence_number": self._events - 1, **fields}

    def _object(self, choice: ChatChoiceState, *, logprobs: bool = True) -> ResponseObject:
        asked, made, status = self.asked, choice.completion is not None, self._status(choice)
        tools = [each.model_dump() | {"strict": bool(each.strict)} for each in asked.tools or ()]
        return ResponseObject.model_validate(
            {
                "id": self.id,
                "created_at": self.created,
                "status": status,
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "instructions": asked.instructions,
                "max_output_tokens": self.sampling.max_new_tokens,
                "metadata": asked.metadata or {},
                "model": self.service.name,
                "output": self._output(choice, logprobs) if made else [],
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "previous_response_id": asked.previous_response_id,
                "reasoning": {"effort": None, "summary": None} | (asked.reasoning or {}),
                "store": self.continuable,
                "tool_call_errors": choice.errors or None,
                "temperature": self.sampling.temperature,
                "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
                "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
                "tools": tools,
                "top_p": self.sampling.top_p,
                "usage": self._token_usage() if made else None,
            }
        )

    def _status(self, choice: ChatChoiceState) -> str:
        if choice.completion is None:
            return "in_progress"
        return "incomplete" if choice.reason == "length" else "completed"

    def _output(self, choice: ChatChoiceState, logprobs: bool) -> list[dict[str, Any]]:
        calls, status = self._call_items(choice), self._status(choice)
        thoughts = list[dict[str, Any]]()
        if choice.reasoning:
            ended = bool(choice.content or calls)
            thoughts.append(self._reasoning_item(choice.reasoning, "completed" if ended else status))
        if not choice.content and (calls or thoughts):
            return [*thoughts, *calls]
        found = list[Any]()
        if logprobs:
            choice.sent = 0
            found = self._logprob_list(choice)
        return [*thoughts, self._message_item(choice.content, found, status), *calls]

    def _reasoning_item(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": text}
        return {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": [part], "status": status}

    def _id(self, kind: str) -> str:
        return self.id.replace("resp", kind, 1)

    def _message_item(self, text: str, logprobs: list[Any], status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        item: dict[str, Any] = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        return item | {"status": status, "content": [part]}

    def _call_items(self, choice: ChatChoiceState) -> list[dict[str, Any]]:
        start = self._id("fc")
        return [
            {"id": f"{start}-{number}", "type": "function_call", "status": "completed", "call_id": call.id}
            | call.message()["function"]
            for number, call in enumerate(choice.calls)
        ]

    def _logprob_list(self, choice: ChatChoiceState) -> list[Any]:
        found = self._logprobs(choice)
        return [] if found is None else list(found["content"])

    def _token_usage(self) -> ResponseUsageInfo:
        usage = self._usage()
        return ResponseUsageInfo(
            input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, total_tokens=usage.total_tokens
        )


def stored_response(service: EndpointService, id: str, caller: Caller) -> bytes:
    """A response that the server holds, as JSON without log-probs. Raises ApiError if it does not."""
    return _session_of(service, id, caller).responses[id].body


def forget_response(service: EndpointService, id: str, caller: Caller) -> None:
    """Give up a response: it can be neither read nor continued any more. What its session has recorded stays, and is
    trained on. Raises ApiError if it is not held."""
    del _session_of(service, id, caller).responses[id]


def _session_of(service: EndpointService, id: str, caller: Caller) -> EndpointSession:
    """The session that holds a response. Raises ApiError, the same one for a response of another client."""
    try:
        session = service.sessions.find(caller.client, answer=id)
    except ApiError as error:
        if error.code != "session_not_found":
            raise
        session = None
    if session is None or id not in session.responses or caller.session not in (None, session.id):
        text = (
            f"there is no response {id[:100]!r}: it was not stored or was deleted, belongs to another session, or its "
            "session was committed or dropped"
        )
        raise ApiError(text, 404, code="response_not_found")
    return session


def _continued(service: EndpointService, previous: str, caller: Caller) -> tuple[tuple[ChatMessageParam, ...], Caller]:
    """The conversation up to a previous response, and the caller in its session. Raises ApiError if it is not held."""
    try:
        session = _session_of(service, previous, caller)
    except ApiError as error:
        if error.code != "response_not_found":
            raise
        text = f"{error}; send the whole conversation"
        raise ApiError(text, 404, code="previous_response_not_found", param="previous_response_id") from error
    return session.responses[previous].conversation, Caller(caller.client, session.id)
