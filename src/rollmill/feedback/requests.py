"""What can be asked for: six kinds of feedback, told apart by their keys."""

from __future__ import annotations

import json
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollmill.errors import RollmillError
from rollmill.trackers.console import printable

# What a person or program that gives feedback did wrong.


class FeedbackError(RollmillError):
    """An act that cannot be done; the message says why. `status` is what HTTP answers with: 404, 409 or 422."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


class FeedbackKind(StrEnum):
    """What an act is."""

    RATE = "rate"  #: a stored completion gets a number
    EDIT = "edit"  #: an expert answer to a stored completion's prompt
    COMPARE = "compare"  #: one of two stored completions is better
    DEMONSTRATE = "demonstrate"  #: an expert answer to any prompt
    PREFER = "prefer"  #: one of two texts is better
    GRADE = "grade"  #: a text gets a number


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
    """What every request has."""

    model_config = ConfigDict(extra="forbid")
    kind: ClassVar[FeedbackKind]
    author: Author  #: the person or application
    key: str | None = Field(None, min_length=1, max_length=200)
    """A request that is repeated with the same author and key is done once."""

    def digest(self) -> str:
        """The same for requests that ask for the same."""
        content = {"kind": self.kind} | self.model_dump(exclude={"key"})
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class RateRequest(FeedbackRequest):
    """How good a stored completion is, from 0 to 1."""

    kind = FeedbackKind.RATE
    completion: str
    step: int | None = None  #: where it is stored; without it, all steps are searched
    rating: Rating


class EditRequest(FeedbackRequest):
    """What a stored completion should have been."""

    kind = FeedbackKind.EDIT
    completion: str
    step: int | None = None
    text: NonEmptyText


class CompareRequest(FeedbackRequest):
    """Which of two stored completions of one prompt is better."""

    kind = FeedbackKind.COMPARE
    better: str
    worse: str
    step: int | None = None


class DemonstrateRequest(FeedbackRequest):
    """An answer to imitate."""

    kind = FeedbackKind.DEMONSTRATE
    prompt: Prompt
    response: NonEmptyText
    task: str = ""


class PreferRequest(FeedbackRequest):
    """Which of two answers is better."""

    kind = FeedbackKind.PREFER
    prompt: Prompt
    chosen: NonEmptyText
    rejected: NonEmptyText
    task: str = ""


class GradeRequest(FeedbackRequest):
    """How good an answer is, from 0 to 1."""

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
    """The request that a JSON object makes; `messages` is another name of `prompt`.

    Raises FeedbackError naming the keys that are wrong, with `where` in front.
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
    """`name` as it is stored. Raises FeedbackError where it is no name."""
    try:
        return _AUTHOR.validate_python(name)
    except ValidationError as error:
        raise FeedbackError(f"author: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


_AUTHOR: TypeAdapter[str] = TypeAdapter(Author)
