"""Request and response bodies of /v1/responses, and the translation of its input to a chat's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollmill.apps.serve.endpoint.protocol import (
    MAX_TOP_LOGPROBS,
    ApiError,
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPartParam,
    RequestBody,
)

_LOGPROBS = "message.output_text.logprobs"
_ItemText = str | Annotated[list[ContentPartParam], Field(fail_fast=True)]


class ResponseItemParam(BaseModel):
    """An item of the input: a `message`, a `function_call`, a `function_call_output`, or the `reasoning` before one of
    the former two. Undeclared fields are ignored."""

    type: str | None = None
    """`message`, if there is none."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _ItemText | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _ItemText | None = None
    summary: Annotated[list[ContentPartParam], Field(fail_fast=True)] | None = None

    @property
    def thought(self) -> str:
        """The text of a reasoning: its content, else its summary."""
        parts = self.content or self.summary or ""
        return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)


class ResponseToolParam(BaseModel):
    """A function that the policy may call. Undeclared fields are ignored."""

    type: str
    """`function`: there are no server tools."""
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseTextParam(BaseModel):
    """The form of the text; the `verbosity` is a hint without effect."""

    format: dict[str, Any] | None = None
    """`text`, `json_object`, or `json_schema` with a `schema`."""


class ResponseRequest(RequestBody):
    """The body of /v1/responses. Null means the default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = ""
    """Ignored: only one model is served."""
    input: str | Annotated[list[ResponseItemParam], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    """The conversation goes on after this response, without its instructions."""
    store: bool | None = None
    """False: the response cannot be continued by its id."""
    tools: Annotated[list[ResponseToolParam], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    """`auto`, `none`, `required`, or the function that is to be called."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = None
    """Keep only the K most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed, prompt and weights give the same completion."""
    text: ResponseTextParam | None = None
    reasoning: dict[str, Any] | None = None
    """`effort`: how much to think, for chat templates that read `reasoning_effort`."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template."""
    include: list[str] | None = None
    """`message.output_text.logprobs` adds the tokens' log-probs; others have no effect."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    """Without effect: token counts are always sent, and nothing is obfuscated."""

    def chat_request(self, before: Sequence[ChatMessageParam]) -> ChatCompletionRequest:
        """The same request as a chat's. Raises ApiError for what is not supported.

        Args:
            before: the conversation up to the previous response.
        """
        messages: list[Any] = [] if self.instructions is None else [_message("system", self.instructions)]
        messages += [*before, *self._messages()]
        if not messages:
            raise ApiError("`input` is empty; send a text or items", code="invalid_value", param="input")
        fields: dict[str, Any] = {
            "messages": messages,
            "tools": self._tools(),
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text is None else self.text.format,
            "max_tokens": self.max_output_tokens,
            "logprobs": self.top_logprobs is not None or _LOGPROBS in (self.include or ()),
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stream"):
            fields[name] = getattr(self, name)
        return ChatCompletionRequest.model_validate(fields)

    def _messages(self) -> list[ChatMessageParam]:
        """The input as messages of a chat: calls that follow the assistant's message are part of it, and so is the
        reasoning before either."""
        if isinstance(self.input, str):
            return [_message("user", self.input)]
        found: list[dict[str, Any]] = []
        open_turn = False  # the latest message is the assistant's, and calls may follow
        bare = False  # it has its reasoning only
        for number, item in enumerate(self.input or ()):
            at = f"input[{number}]"
            if item.type == "reasoning":
                if bare:
                    found[-1]["reasoning_content"] += item.thought
                elif item.thought:  # else it is encrypted, by another server
                    found.append({"role": "assistant", "content": "", "reasoning_content": item.thought})
                    open_turn = bare = True
                continue
            if bare and item.type in (None, "message") and item.role == "assistant":
                found[-1]["content"], bare = _required(item, "content", at), False
                continue
            bare = False
            if item.type == "function_call":
                if not open_turn:
                    found.append({"role": "assistant", "content": ""})
                    open_turn = True
                function = {"name": _required(item, "name", at), "arguments": item.arguments or "{}"}
                call = {"id": _required(item, "call_id", at), "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
                continue
            if item.type == "function_call_output":
                result = _required(item, "output", at)
                found.append({"role": "tool", "content": result, "tool_call_id": _required(item, "call_id", at)})
            elif item.type in (None, "message"):
                found.append({"role": _required(item, "role", at), "content": _required(item, "content", at)})
            else:
                text = f"{at} is of type {item.type[:40]!r}, which is not supported here; send messages and calls"
                raise ApiError(text, code="unsupported_content", param=at)
            open_turn = found[-1]["role"] == "assistant"
        return [ChatMessageParam.model_validate(each) for each in found]

    def _tools(self) -> list[dict[str, Any]] | None:
        found = list[dict[str, Any]]()
        for number, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.name is None:
                text = f"tools[{number}] ({tool.type[:40]!r}) is not a function with a name; only those are supported"
                raise ApiError(text, code="unsupported_parameter", param=f"tools[{number}].type")
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            given = {key: value for key, value in function.items() if value is not None}
            found.append({"type": "function", "function": given})
        return found or None


class ResponseUsageInfo(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int] = {"cached_tokens": 0, "cache_write_tokens": 0}
    output_tokens: int
    output_tokens_details: dict[str, int] = {"reasoning_tokens": 0}
    total_tokens: int


class ResponseOutputItem(BaseModel):
    """An item of the output: the policy's `reasoning`, its `message`, or a `function_call`."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseObject(BaseModel):
    """The policy's turn, with the settings that it was generated with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: bool = False
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int
    metadata: dict[str, str]
    model: str
    output: list[ResponseOutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any] = {"effort": None, "summary": None}
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsageInfo | None
    tool_call_errors: list[str] | None = None
    """An error for each call that cannot be read or was cut off; its text is in the message."""
    user: None = None


class DeletedResponse(BaseModel):
    """A response that the server holds no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def _message(role: str, content: str) -> ChatMessageParam:
    return ChatMessageParam.model_validate({"role": role, "content": content})


def _required(item: ResponseItemParam, name: str, at: str) -> Any:
    value = getattr(item, name)
    if value is None:
        kind = item.type or "message"
        raise ApiError(f"{at}: an item of type {kind} needs `{name}`", code="invalid_value", param=f"{at}.{name}")
    return value


def _choice(choice: Any) -> Any:
    """A forced function in the format of chats."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
