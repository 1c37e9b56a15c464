"""What the endpoint answers, in OpenAI's format."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rollmill.types import StopReason

FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.REPETITION: "length",
    StopReason.ABORTED: "length",
}
"""What clients are told: `stop` where the policy ended its answer, `length` where it was ended."""


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
    """What is served. `max_model_len` counts tokens, prompt included."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rollmill"
    max_model_len: int
    weights_version: int


class ModelList(BaseModel):
    """The models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """Whether requests are answered."""

    status: Literal["ok", "failed", "ending"]
    model: str
    weights_version: int
    under_way: int
    sessions: int
    message: str | None = None


class FeedbackResponse(BaseModel):
    """What is known of a session now."""

    session: str
    reward: float
    parts: dict[str, float]
    committed: bool = False


class CommitResponse(BaseModel):
    """What was handed over."""

    committed: list[str]
    experiences: int
