"""Feedback requests: six kinds, distinguished by their keys."""

from __future__ import annotations

import json
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.trackers.console import printable


class FeedbackError(RequestRefusedError):
    """Invalid feedback; the message gives the reason. `status` is the HTTP status: 403, 404, 409 or 422, for
    example."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message, status, code="refused")


class FeedbackKind(StrEnum):
    """Kind of feedback."""

    RATE = "rate"  #: a number for a stored completion
    EDIT = "edit"  #: a demonstration to a stored completion's prompt
    COMPARE = "compare"  #: one of two stored completions is better
    DEMONSTRATE = "demonstrate"  #: a demonstration to any prompt
    PREFER = "prefer"  #: one of two texts is better
    GRADE = "grade"  #: a number for a text


def _name(value: str) -> str:
    if not value.strip() or printable(value) != value or "\n" in value or "\t" in value:
        raise ValueError("a name of visible characters")
    return value.strip()


Author = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_name)]
NonEmptyText = Annotated[str, Field(min_length=1)]
Rating = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: NonEmptyText
    content: str


Prompt = NonEmptyText | Annotated[list[ChatMessage], Field(min_length=1)]


class FeedbackRequest(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid")
    kind: ClassVar[FeedbackKind]
    author: Author  #: the person or application
    key: str | None = Field(None, min_length=1, max_length=200)
    """Idempotency key: a repeated request with the same author and key is applied once."""

    def digest(self) -> str:
        """Returns a hash of the content, equal for equal requests."""
        content = {"kind": self.kind} | self.model_dump(exclude={"key"})
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class RateRequest(FeedbackRequest):
    """Rates a stored completion, from 0 to 1."""

    kind = FeedbackKind.RATE
    completion: str
    step: int | None = None  #: step that stores it; without it, all steps are searched
    rating: Rating


class EditRequest(FeedbackRequest):
    """Gives the correct answer in place of a stored completion."""

    kind = FeedbackKind.EDIT
    completion: str
    step: int | None = None
    text: NonEmptyText


class CompareRequest(FeedbackRequest):
    """Prefers one of two stored completions of the same prompt."""

    kind = FeedbackKind.COMPARE
    better: str
    worse: str
    step: int | None = None


class DemonstrateRequest(FeedbackRequest):
    """Gives an answer to imitate."""

    kind = FeedbackKind.DEMONSTRATE
    prompt: Prompt
    response: NonEmptyText
    task: str = ""


class PreferRequest(FeedbackRequest):
    """Prefers one of two answers to a prompt."""

    kind = FeedbackKind.PREFER
    prompt: Prompt
    chosen: NonEmptyText
    rejected: NonEmptyText
    task: str = ""


class GradeRequest(FeedbackRequest):
    """Rates an answer to a prompt, from 0 to 1."""

    kind = FeedbackKind.GRADE
    prompt: Prompt
    response: NonEmptyText
    rating: Rating
    task: str = ""


_SHAPES: list[tuple[set[str], type[FeedbackRequest]]] = [
    ({"completion", "rating"}, RateRequest),
    ({"completion", "text"}, EditRequest),
    ({"better", "worse"}, CompareRequest),
    ({"chosen", "rejected"}, PreferRequest),
    ({"response", "rating"}, GradeRequest),
    ({"response"}, DemonstrateRequest),
]
_MOST_NAMED = 10
_KNOWN = (
    "{completion, rating}, {completion, text}, {better, worse}, {prompt, response}, {prompt, chosen, rejected} or "
    "{prompt, response, rating}, each with author"
)


def parse_request(row: Any, where: str = "") -> FeedbackRequest:
    """Parses a request from a JSON object; `messages` is an alias of `prompt`.

    Raises FeedbackError naming the wrong keys, with `where` in front.
    """
    if not isinstance(row, dict):
        raise FeedbackError(f"{where}expected a JSON object, found {type(row).__name__}")
    if "messages" in row and "prompt" not in row:
        row = {("prompt" if key == "messages" else key): value for key, value in row.items()}
    model = next((model for keys, model in _SHAPES if keys <= row.keys()), None)
    if model is None:
        found = ", ".join(islice(map(str, row), 20)) or "none"
        raise FeedbackError(f"{where}no feedback has these keys ({printable(found)[:200]}); expected {_KNOWN}")
    try:
        return model.model_validate(row)
    except ValidationError as error:
        raise FeedbackError(f"{where}{model.kind}: {_in_words(error)}") from error


def _in_words(error: ValidationError) -> str:
    wrong, found = [], error.errors(include_url=False, include_context=False, include_input=False)
    for each in found[:_MOST_NAMED]:
        place = ".".join(str(part) for part in each["loc"])
        wrong.append(f"{printable(place)[:80]}: {each['msg'].removeprefix('Value error, ')}")
    more = len(found) - _MOST_NAMED
    return "; ".join(wrong) + (f"; and {more} more" if more > 0 else "")


def parse_author(name: str) -> str:
    """Returns `name` as it is stored. Raises FeedbackError if it is not a valid name."""
    try:
        return _AUTHOR.validate_python(name)
    except ValidationError as error:
        raise FeedbackError(f"author: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


_AUTHOR: TypeAdapter[str] = TypeAdapter(Author)
