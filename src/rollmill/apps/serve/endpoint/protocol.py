"""Request and response bodies of the endpoint, and its errors, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.data.images import ImageRef
from rollmill.types import StopReason

MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_STOP_STRINGS, MAX_REWARD_PARTS, MAX_COMMITTED = 64, 20, 16, 64, 10_000
StopText = Annotated[str, Field(max_length=256, min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""A list that names its first wrong item only: a body may hold a million of them."""
Texts = Annotated[list[str], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MAX_BIASES = 2000
Bias = Annotated[float, Field(ge=-100, le=100)]
SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{1,128}$")]
"""Name of a session, usable in a URL."""
PartName = Annotated[str, Field(min_length=1, max_length=128)]
FiniteReward = Annotated[float, Field(ge=-1e6, le=1e6)]


class RequestBody(BaseModel):
    """A JSON object whose values must have exactly the declared types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""


class BaseCompletionRequest(RequestBody):
    """Fields shared by both kinds of completions. Null means the default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = ""
    """Ignored: only one model is served."""
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
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: Penalty | None = None
    """Likewise, times their number."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Divides the logits of tokens in prompt and completion where they are positive, and multiplies negative ones."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    """Added to the logits of tokens, by their id."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the response."""


class ContentPartParam(BaseModel):
    """A part of a message: a text, or a picture (`image_url`, `input_image`)."""

    type: str
    text: str | None = None
    image_url: Any = None
    """A `data:` URL, or an object with it as `url`."""
    _image: ImageRef | None = PrivateAttr(None)

    @property
    def image(self) -> ImageRef | None:
        """The picture, once it was read."""
        return self._image

    def keep(self, image: ImageRef) -> None:
        """Keep the picture that was read, in place of its text, which is much larger."""
        self._image, self.image_url = image, None


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
    """A chat message. Undeclared fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPartParam], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    """The reasoning of an assistant's turn, as a text; what else clients put here is ignored."""
    reasoning: Any = None
    """The same by another name."""

    @property
    def known_reasoning(self) -> str:
        """The reasoning; empty if there is none."""
        given = [each for each in (self.reasoning_content, self.reasoning) if isinstance(each, str) and each]
        return given[0] if given else ""


class FunctionDefinition(BaseModel):
    """A tool's function as templates show it; undeclared fields are shown, too."""

    model_config = ConfigDict(extra="allow")

    name: str


class ToolParam(BaseModel):
    """A tool that the policy may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatCompletionRequest(BaseCompletionRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessageParam], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[ToolParam], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    """`auto`, `none`, `required`, or the function that is to be called."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    response_format: dict[str, Any] | None = None
    """`text`, `json_object`, or `json_schema` with a schema, which the answer follows."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template, such as `enable_thinking`, as in vLLM."""
    reasoning_effort: Any = None
    """How much to think, for chat templates that read it; `none` switches thinking off. Else ignored."""
    thinking: Any = None
    """`{type: enabled}` or `{type: disabled}`, likewise."""


class CompletionRequest(BaseCompletionRequest):
    """The body of /v1/completions."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """A text, tokens, or several of either."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """0 only with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    """Start the text with the prompt."""


class RewardRequest(RequestBody):
    """The body of /feedback: the reward of a session, or of the session that a completion belongs to."""

    session: SessionName | None = None
    completion: str | None = None
    """The `id` of a response."""
    reward: FiniteReward | Annotated[dict[PartName, FiniteReward], Field(min_length=1, max_length=MAX_REWARD_PARTS)]
    """A number, or several by name, whose sum counts. Earlier rewards of other names stay; a session has at most 64."""
    commit: bool = False
    """The session is finished: hand it over at once."""


class CommitRequest(RequestBody):
    """The body of /commit: the finished sessions. Without either field: the session named by key, header or path, else
    all that have a reward and no running call."""

    session: SessionName | None = None
    sessions: Annotated[list[SessionName], Field(max_length=MAX_COMMITTED, fail_fast=True)] | None = None


FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.REPETITION: "length",
    StopReason.ABORTED: "length",
}
"""Finish reasons shown to clients: `stop` if the policy ended its answer, `length` if it was cut off."""


class UsageInfo(BaseModel):
    """Token counts; a prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseFunctionCall(BaseModel):
    """Name and arguments (JSON) of a call."""

    name: str
    arguments: str


class ResponseToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class ResponseMessage(BaseModel):
    """The policy's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ResponseToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same: vLLM has used both names."""
    tool_call_errors: list[str] | None = None
    """An error for each call that cannot be read or was cut off; its text is in the content."""


class ChatCompletionChoice(BaseModel):
    """One of `n`."""

    index: int
    message: ResponseMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One of `n` for each prompt."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class ModelCard(BaseModel):
    """The served model. `max_model_len` counts tokens, prompt included."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rollmill"
    max_model_len: int
    weights_version: int


class ModelList(BaseModel):
    """The list of models, with one entry."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """State of the server."""

    status: Literal["ok", "failed", "ending"]
    model: str
    weights_version: int
    under_way: int
    sessions: int
    message: str | None = None


class FeedbackResponse(BaseModel):
    """The session's rewards so far."""

    session: str
    reward: float
    parts: dict[str, float]
    committed: bool = False


class CommitResponse(BaseModel):
    """The sessions handed over."""

    committed: list[str]
    experiences: int


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's protocol, whose errors have a format of their own."""


class ErrorInfo(BaseModel):
    """An error, and what to do about it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every response that is not 200."""

    error: ErrorInfo


class AnthropicErrorInfo(BaseModel):
    """An error, and what to do about it."""

    type: str
    message: str
    details: dict[str, str | None] = {}
    """`error_code` identifies the error for programs."""


class AnthropicErrorResponse(BaseModel):
    """Body of every response of /v1/messages that is not 200."""

    type: Literal["error"] = "error"
    error: AnthropicErrorInfo


class ApiError(RequestRefusedError):
    """A refused or failed request, in the format of the protocol that it uses."""

    @classmethod
    def of(cls, error: RequestRefusedError) -> ApiError:
        """The same refusal in this format."""
        return cls(str(error), error.status, code=error.code, param=error.param, retry_s=error.retry_s)

    def body(self, path: str = "") -> dict[str, Any]:
        """The response body as JSON, in the format of the protocol that `path` belongs to."""
        if path.startswith(MESSAGES_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            named = AnthropicErrorInfo(type=kind, message=str(self), details={"error_code": self.code})
            return AnthropicErrorResponse(error=named).model_dump()
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        details = ErrorInfo(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=details).model_dump()
