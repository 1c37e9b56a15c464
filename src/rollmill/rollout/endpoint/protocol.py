"""What the endpoint is asked: bodies of requests. `fields.py` says what becomes of fields that are not named here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_STOP_STRINGS, MAX_REWARD_PARTS = 64, 20, 16, 64
StopText = Annotated[str, Field(max_length=256, min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,128}$")]
"""Of a session: it may stand in an address."""
PartName = Annotated[str, Field(min_length=1, max_length=128)]
FiniteReward = Annotated[float, Field(ge=-1e6, le=1e6)]


class RequestBody(BaseModel):
    """A JSON object whose values have exactly the types that are named."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    """How an answer is streamed."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""


class BaseCompletionRequest(RequestBody):
    """What both kinds of completions have in common. Null stands for the default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = ""
    """Any name: one model is served."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed, prompt and weights give the same completion."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = None
    """Keep only the K most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less probable than this times the most probable one."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the answer."""


class TextContentPart(BaseModel):
    """A part of a message: text."""

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """The function of a tool call; `arguments` is JSON."""

    name: str
    arguments: str = "{}"


class ToolCallParam(BaseModel):
    """A tool call of an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessageParam(BaseModel):
    """A message of a chat. Fields that are not named are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """What a template shows of a tool; fields that are not named are shown, too."""

    model_config = ConfigDict(extra="allow")

    name: str


class ToolParam(BaseModel):
    """A tool the policy may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatCompletionRequest(BaseCompletionRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessageParam], Field(min_length=1)]
    tools: list[ToolParam] | None = None
    tool_choice: Any = None
    """`auto` or `none`; a call cannot be forced."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class CompletionRequest(BaseCompletionRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    """A text, tokens, or several of either."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """0 only with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    """Begin the text with the prompt."""


class RewardRequest(RequestBody):
    """The body of /feedback: the reward of a session, or of the session that a completion belongs to."""

    session: SessionName | None = None
    completion: str | None = None
    """The `id` of an answer."""
    reward: FiniteReward | Annotated[dict[PartName, FiniteReward], Field(min_length=1, max_length=MAX_REWARD_PARTS)]
    """A number, or several by name, whose sum counts. What was said before under another name stays; a session has at
    most 64 names."""
    commit: bool = False
    """The session is finished: hand it over at once."""


class CommitRequest(RequestBody):
    """The body of /commit: which sessions are finished. Neither: the one that the key, the header or the path names,
    else all that have a reward and are not being answered."""

    session: SessionName | None = None
    sessions: list[SessionName] | None = None
