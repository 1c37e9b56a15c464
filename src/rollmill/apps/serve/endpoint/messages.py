"""Normalizes the messages that clients send, so that the policy's own turns are recognized when they come back.

Contents become texts; in those for a vision-language model, pictures are references.

Clients give content as text or parts, write arguments as JSON in various ways and may renumber calls. Normalized,
arguments are objects, calls are numbered through the conversation, and fields unknown to templates are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmill.apps.serve.endpoint.pictures import PictureReader
from rollmill.apps.serve.endpoint.protocol import ApiError, ChatMessageParam
from rollmill.errors import EngineError
from rollmill.types import ToolCall


def normalize_messages(
    messages: Sequence[ChatMessageParam], pictures: PictureReader | None = None
) -> list[dict[str, Any]]:
    """Normalize the messages. Raises ApiError naming a message that lacks something or cannot be read.

    Args:
        pictures: reads those of one request; None: for a model that reads text only.
    """
    ids: dict[str, str] = {}
    reader = pictures or PictureReader()
    return [_message(message, f"messages[{number}]", ids, reader) for number, message in enumerate(messages)]


def assistant_message(content: str, calls: Sequence[ToolCall], reasoning: str = "") -> ChatMessageParam:
    """The policy's turn as a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return ChatMessageParam.model_validate(
        message | ({"tool_calls": [call.message() for call in calls]} if calls else {})
    )


def check_text(text: str) -> str:
    """Return the text. Raises ApiError if it cannot be encoded, as with half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError("the request holds half a surrogate pair; send UTF-8", code="bad_text") from None
    return text


def template_error(error: EngineError) -> ApiError:
    """Build the ApiError for messages that the chat template refuses."""
    return ApiError(str(error), code="invalid_messages", param="messages")


def _message(message: ChatMessageParam, at: str, ids: dict[str, str], reader: PictureReader) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    calls = message.tool_calls if message.role == "assistant" else None
    reasoning = message.known_reasoning if message.role == "assistant" else ""
    if message.content is None and not calls and not reasoning:
        raise ApiError(f"{at} has no content; send a text", code="invalid_messages", param=f"{at}.content")
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else "".join(reader.text(part, at) for part in content)
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = [_call(call.id, call.function.name, call.function.arguments, ids) for call in calls]
    if message.role == "tool":
        if message.tool_call_id is None:
            text = f"{at} is a tool's result; send the `tool_call_id` that it answers"
            raise ApiError(text, code="invalid_messages", param=f"{at}.tool_call_id")
        found["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
    if message.name is not None and message.role != "assistant":
        found["name"] = message.name
    return found


def _call(id: str, name: str, arguments: str, ids: dict[str, str]) -> dict[str, Any]:
    ids[id] = f"call{len(ids):05d}"  # nine characters, as some templates require
    value: Any
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = arguments  # as a policy may have written it
    return {"id": ids[id], "type": "function", "function": {"name": name, "arguments": value}}
