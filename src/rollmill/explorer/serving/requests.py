"""What the endpoint is asked: bodies of requests. `fields.py` says what becomes of fields that are not named here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES, MOST_TOP, MOST_STOPS, MOST_PARTS = 64, 20, 16, 64
Text = Annotated[str, Field(max_length=256, min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,128}$")]
"""Of a session: it may stand in an address."""
PartName = Annotated[str, Field(min_length=1, max_length=128)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]


class Body(BaseModel):
    """A JSON object whose values have exactly the types that are named."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""


class Sampling(Body):
    """What both kinds of completions have in common. Null stands for the default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = ""
    """Any name: one model is served."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed, prompt and weights give the same completion."""
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = None
    """Keep only the K most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less probable than this times the most probable one."""
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the answer."""


class Part(BaseModel):
    """A part of a message: text."""

    type: str
    text: str | None = None


class Function(BaseModel):
    """The function of a tool call; `arguments` is JSON."""

    name: str
    arguments: str = "{}"


class Call(BaseModel):
    """A tool call of an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """A message of a chat. Fields that are not named are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ToolFunction(BaseModel):
    """What a template shows of a tool; fields that are not named are shown, too."""

    model_config = ConfigDict(extra="allow")

    name: str


class Tool(BaseModel):
    """A tool the policy may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    """`auto` or `none`; a call cannot be forced."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    """A text, tokens, or several of either."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """0 only with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    """Begin the text with the prompt."""


class Feedback(Body):
    """The body of /feedback: the reward of a session, or of the session that a completion belongs to."""

    session: Name | None = None
    completion: str | None = None
    """The `id` of an answer."""
    reward: Number | Annotated[dict[PartName, Number], Field(min_length=1, max_length=MOST_PARTS)]
    """A number, or several by name, whose sum counts. What was said before under another name stays; a session has at
    most 64 names."""
    commit: bool = False
    """The session is finished: hand it over at once."""


class Commit(Body):
    """The body of /commit: which sessions are finished. Neither: the one that the key, the header or the path names,
    else all that have a reward and are not being answered."""

    session: Name | None = None
    sessions: list[Name] | None = None
