"""Handler of /v1/messages: a chat request in Anthropic's protocol."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rollmill.apps.serve.endpoint.anthropic_protocol import (
    AnthropicUsage,
    ContentBlock,
    MessageResponse,
    MessagesRequest,
    TokenCount,
    TokenCountRequest,
)
from rollmill.apps.serve.endpoint.chat_completions import ChatChoiceState, ChatCompletionHandler
from rollmill.apps.serve.endpoint.extra_fields import check_extra_fields
from rollmill.apps.serve.endpoint.messages import normalize_messages, template_error
from rollmill.apps.serve.endpoint.middleware import Caller
from rollmill.apps.serve.endpoint.pictures import PictureReader, shows_pictures
from rollmill.apps.serve.endpoint.protocol import MESSAGES_PATH, ApiError, ChatCompletionRequest
from rollmill.apps.serve.endpoint.service import INLINE_BYTES, EndpointService
from rollmill.apps.serve.endpoint.session import requested_tools
from rollmill.apps.serve.endpoint.switches import template_switches
from rollmill.errors import EngineError
from rollmill.types import Completion, StopReason, ToolCall


class MessagesHandler(ChatCompletionHandler):
    """A running request of /v1/messages. Raises ApiError if it cannot be answered."""

    kind = "msg"
    named_events = True

    def __init__(self, service: EndpointService, body: MessagesRequest, caller: Caller, size: int) -> None:
        check_extra_fields(body.model_extra)
        super().__init__(service, body.chat_request(), caller, size)

    def response(self) -> MessageResponse:  # type: ignore[override]  # another protocol
        [choice] = self.choices
        assert choice.completion is not None
        blocks = [_thinking(choice.reasoning)] if choice.reasoning else []
        if choice.content or not (choice.calls or blocks):
            blocks.append({"type": "text", "text": choice.content})
        blocks += [_tool_use(call) | {"input": call.arguments} for call in choice.calls]
        return self._message(choice, [ContentBlock.model_validate(block) for block in blocks])

    def last_event(self) -> dict[str, Any]:
        return {"type": "message_stop"}

    def error_event(self, error: ApiError) -> dict[str, Any]:
        return error.body(MESSAGES_PATH)

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        [choice] = self.choices
        yield {"type": "message_start", "message": self._message(choice, []).model_dump()}
        thinks = says = False
        async with aclosing(self._changes()) as changes:
            async for _, new in changes:
                if new.reasoning:
                    if not thinks:
                        yield _start(0, {"type": "thinking", "thinking": "", "signature": ""})
                    thinks = True
                    yield _delta(0, {"type": "thinking_delta", "thinking": new.reasoning})
                plain = choice.completion is not None and not (choice.calls or thinks)
                if not says and (new.content or plain):
                    if thinks:
                        for event in _end_of_thinking(choice.reasoning):
                            yield event
                    yield _start(int(thinks), {"type": "text", "text": ""})
                    says = True
                if new.content:
                    yield _delta(int(thinks), {"type": "text_delta", "text": new.content})
        if says:
            yield {"type": "content_block_stop", "index": int(thinks)}
        elif thinks:
            for event in _end_of_thinking(choice.reasoning):
                yield event
        for index, call in enumerate(choice.calls, start=thinks + says):
            yield _start(index, _tool_use(call) | {"input": {}})
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            yield _delta(index, {"type": "input_json_delta", "partial_json": arguments})
            yield {"type": "content_block_stop", "index": index}
        ended = self._message(choice, []).model_dump()
        delta = {key: ended[key] for key in ("stop_reason", "stop_sequence", "tool_call_errors")}
        yield {"type": "message_delta", "delta": delta, "usage": ended["usage"]}

    def _message(self, choice: ChatChoiceState, content: list[ContentBlock]) -> MessageResponse:
        usage, made = self._usage(), choice.completion
        stop = None if made is None else self._stop_string(made)
        reason = None
        if made is not None:
            ended = "end_turn" if stop is None else "stop_sequence"
            reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(choice.reason, ended)
        return MessageResponse.model_validate(
            {
                "id": self.id,
                "model": self.service.name,
                "content": content,
                "stop_reason": reason,
                "stop_sequence": stop if reason == "stop_sequence" else None,
                "tool_call_errors": choice.errors or None,
                "usage": AnthropicUsage(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens),
            }
        )

    def _stop_string(self, completion: Completion) -> str | None:
        """The stop string that ended a completion."""
        if completion.stop_reason is not StopReason.STOP:
            return None
        text = self.service.chat.decode(completion.token_ids.tolist())
        found = [(text.find(stop), stop) for stop in self.body.stop or () if stop in text]
        return min(found)[1] if found else None


async def count_tokens(service: EndpointService, body: TokenCountRequest, size: int) -> TokenCount:
    """Count the tokens of a prompt. Raises ApiError if the template refuses it, or it does not fit."""
    check_extra_fields(body.model_extra)
    chat = ChatCompletionRequest.model_validate(body.as_chat())

    def count() -> int:
        try:
            messages = normalize_messages(chat.messages, PictureReader(service.chat.sees, service.chat.folder))
            switches = template_switches(chat, service.switches, service.chat.renderer())
            tools = requested_tools(chat)
            prompt = service.chat.prompt(messages, (), tools, switches=switches, check=service.check_text)
        except EngineError as error:
            raise template_error(error) from error
        except RecursionError:
            raise ApiError("the request is nested too deeply; send less", code="invalid_messages") from None
        return len(prompt.token_ids)

    with service.gate.preparing():
        size = max(size, INLINE_BYTES + 1) if shows_pictures(chat.messages) else size
        return TokenCount(input_tokens=await service.tokenized(size, count))


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": _signature(text)}


def _end_of_thinking(text: str) -> list[dict[str, Any]]:
    signed = _delta(0, {"type": "signature_delta", "signature": _signature(text)})
    return [signed, {"type": "content_block_stop", "index": 0}]


def _signature(text: str) -> str:
    """A signature, without which clients do not send a block of thinking back; it is not checked."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=32).hexdigest()


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
