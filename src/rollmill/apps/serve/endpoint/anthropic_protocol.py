"""Request and response bodies of /v1/messages, Anthropic's protocol, and their translation to a chat's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollmill.apps.serve.endpoint.protocol import (
    MAX_STOP_STRINGS,
    ApiError,
    ChatCompletionRequest,
    RequestBody,
    StopText,
    TokenId,
)


class ResultBlockParam(BaseModel):
    """A block of a tool's result: `text` or `image`. Undeclared fields are ignored."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    """The picture of an `image`: `base64` with `media_type` and `data`."""


class ContentBlockParam(ResultBlockParam):
    """A block of a message: `text`, `image`, `tool_use`, `tool_result`, or `thinking`."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[ResultBlockParam], Field(fail_fast=True)] | None = None
    """The result of a tool."""


AnthropicContent = str | Annotated[list[ContentBlockParam], Field(fail_fast=True)]


class AnthropicMessageParam(BaseModel):
    """A message. Undeclared fields are ignored."""

    role: Literal["user", "assistant", "system"]
    content: AnthropicContent


class AnthropicToolParam(BaseModel):
    """A tool that the policy may call. Undeclared fields are ignored."""

    type: str | None = None
    """`custom`, also by default: there are no server tools."""
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(BaseModel):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicOutputConfig(BaseModel):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """`json_schema` with a `schema`."""
    effort: Any = None
    """How much to think, for chat templates that read `reasoning_effort`."""


class TokenCountRequest(RequestBody):
    """The body of /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = ""
    """Ignored: only one model is served."""
    messages: Annotated[list[AnthropicMessageParam], Field(min_length=1, fail_fast=True)]
    system: AnthropicContent | None = None
    tools: Annotated[list[AnthropicToolParam], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: AnthropicOutputConfig | None = None
    thinking: Any = None
    """`{type: enabled}` or `{type: disabled}`, for chat templates that read it."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template."""
    thread: dict[str, Any] | None = None
    """Not supported; Anthropic's clients then send the whole conversation."""

    def as_chat(self) -> dict[str, Any]:
        """The conversation and its tools as fields of a chat request. Raises ApiError for a block that is not text."""
        if self.thread is not None:
            text = "conversations are not held here for `thread`; send all messages"
            raise ApiError(text, code="thread_unsupported_request", param="thread")
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{number}]")
        if messages[-1]["role"] == "assistant":
            text = "the last message is the assistant's: an answer cannot be begun for the policy; end with the user's"
            raise ApiError(text, code="invalid_messages", param="messages")
        return {
            "messages": messages,
            "tools": _chat_tools(self.tools),
            "tool_choice": _chat_choice(self.tool_choice),
            "thinking": self.thinking,
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class MessagesRequest(TokenCountRequest):
    """The body of /v1/messages. Null means the default."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = None
    """Keep only the K most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed, prompt and weights give the same completion."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None

    def chat_request(self) -> ChatCompletionRequest:
        """The same request as a chat's. Raises ApiError for what is not supported."""
        fields = self.as_chat() | {"stop": self.stop_sequences}
        fields["response_format"] = None if self.output_config is None else self.output_config.format
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "stream"):
            fields[name] = getattr(self, name)
        return ChatCompletionRequest.model_validate(fields)


class AnthropicUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class ContentBlock(BaseModel):
    """A block of the policy's turn: `thinking` with its `signature`, `text`, or `tool_use` with `id`, `name` and
    `input`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["thinking", "text", "tool_use"]


class MessageResponse(BaseModel):
    """The policy's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    tool_call_errors: list[str] | None = None
    """An error for each call that cannot be read or was cut off; its text is in a block of text."""


class TokenCount(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


def _chat_messages(message: AnthropicMessageParam, at: str) -> list[dict[str, Any]]:
    """The messages of a chat that one message stands for: each result of a tool is one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, calls, found = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    thoughts = list[str]()

    def add_parts() -> None:
        if parts:
            found.append({"role": message.role, "content": _content(parts)})
            parts.clear()

    for number, block in enumerate(message.content):
        where = f"{at}.content[{number}]"
        if block.type == "tool_result" and message.role == "user":
            add_parts()
            given = block.content or ""
            result = given if isinstance(given, str) else _content([_part(each, where) for each in given])
            found.append({"role": "tool", "tool_call_id": _required(block, "tool_use_id", where), "content": result})
        elif block.type == "tool_use" and message.role == "assistant":
            arguments = _json(block.input or {}, where)
            function = {"name": _required(block, "name", where), "arguments": arguments}
            calls.append({"id": _required(block, "id", where), "type": "function", "function": function})
        elif block.type in ("thinking", "redacted_thinking") and message.role == "assistant":
            thoughts.append(block.thinking or "")
        else:
            parts.append(_part(block, at))
    if calls or parts or not found:
        turn = {"role": message.role, "content": _content(parts)}
        turn |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        found.append(turn | ({"tool_calls": calls} if calls else {}))
    return found


def _part(block: ResultBlockParam, at: str) -> dict[str, Any]:
    """A block as a part of a chat message. Raises ApiError for other blocks than texts and pictures."""
    if block.type == "text" and block.text is not None:
        return {"type": "text", "text": block.text}
    if block.type != "image":
        text = f"{at} holds a block of type {block.type[:40]!r}, which is not supported here; send texts and pictures"
        raise ApiError(text, code="unsupported_content", param=at)
    source = block.source or {}
    if source.get("type") == "url":
        return {"type": "image_url", "image_url": str(source.get("url"))}
    media, data = source.get("media_type"), source.get("data")
    if source.get("type") != "base64" or not isinstance(media, str) or not isinstance(data, str):
        text = f"{at} holds a block of type 'image' without `source`: base64 with `media_type` and `data`"
        raise ApiError(text, code="unsupported_content", param=at)
    return {"type": "image_url", "image_url": f"data:{media};base64,{data}"}


def _content(parts: Sequence[dict[str, Any]]) -> Any:
    """The content of a message: a text, or parts if there are pictures."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else list(parts)


def _text(content: AnthropicContent, at: str) -> str:
    """A content without pictures. Raises ApiError if it has other blocks than texts."""
    parts = [] if isinstance(content, str) else [_part(block, at) for block in content]
    if any(part["type"] != "text" for part in parts):
        raise ApiError(f"{at} holds a picture; send pictures in messages", code="unsupported_content", param=at)
    return content if isinstance(content, str) else "".join(part["text"] for part in parts)


def _required(block: ContentBlockParam, name: str, at: str) -> str:
    value: str | None = getattr(block, name)
    if value is None:
        raise ApiError(f"{at}: a block of type {block.type} needs `{name}`", code="invalid_messages", param=at)
    return value


def _json(value: Any, at: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"{at} is nested too deeply; send fewer levels"
        raise ApiError(text, code="invalid_messages", param=at) from None


def _chat_tools(tools: Sequence[AnthropicToolParam] | None) -> list[dict[str, Any]] | None:
    found = list[dict[str, Any]]()
    for number, tool in enumerate(tools or ()):
        if tool.type not in (None, "custom"):
            text = f"tools[{number}] is a server tool ({tool.type[:40]!r}); only tools of the client are supported"
            raise ApiError(text, code="unsupported_parameter", param=f"tools[{number}].type")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        given = {key: value for key, value in function.items() if value is not None}
        found.append({"type": "function", "function": given})
    return found or None


def _chat_choice(choice: AnthropicToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    return "required" if choice.type == "any" else {"type": "function", "function": {"name": choice.name}}
