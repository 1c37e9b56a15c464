"""What can be asked for: six kinds of feedback, told apart by their keys."""

from __future__ import annotations

import json
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollmill.feedback.refused import RefusedError
from rollmill.monitor.printable import printable


class Kind(StrEnum):
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
Written = Annotated[str, Field(min_length=1)]
Rating = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: Written
    content: str


Prompt = Written | Annotated[list[ChatMessage], Field(min_length=1)]


class Request(BaseModel):
    """What every request has."""

    model_config = ConfigDict(extra="forbid")
    kind: ClassVar[Kind]
    author: Author  #: the person or application
    key: str | None = Field(None, min_length=1, max_length=200)
    """A request that is repeated with the same author and key is done once."""

    def digest(self) -> str:
        """The same for requests that ask for the same."""
        content = {"kind": self.kind} | self.model_dump(exclude={"key"})
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Rate(Request):
    """How good a stored completion is, from 0 to 1."""

    kind = Kind.RATE
    completion: str
    step: int | None = None  #: where it is stored; without it, all steps are searched
    rating: Rating


class Edit(Request):
    """What a stored completion should have been."""

    kind = Kind.EDIT
    completion: str
    step: int | None = None
    text: Written


class Compare(Request):
    """Which of two stored completions of one prompt is better."""

    kind = Kind.COMPARE
    better: str
    worse: str
    step: int | None = None


class Demonstrate(Request):
    """An answer to imitate."""

    kind = Kind.DEMONSTRATE
    prompt: Prompt
    response: Written
    task: str = ""


class Prefer(Request):
    """Which of two answers is better."""

    kind = Kind.PREFER
    prompt: Prompt
    chosen: Written
    rejected: Written
    task: str = ""


class Grade(Request):
    """How good an answer is, from 0 to 1."""

    kind = Kind.GRADE
    prompt: Prompt
    response: Written
    rating: Rating
    task: str = ""


_SHAPES: list[tuple[set[str], type[Request]]] = [
    ({"completion", "rating"}, Rate),
    ({"completion", "text"}, Edit),
    ({"better", "worse"}, Compare),
    ({"chosen", "rejected"}, Prefer),
    ({"response", "rating"}, Grade),
    ({"response"}, Demonstrate),
]
_MOST_NAMED = 10
_KNOWN = (
    "{completion, rating}, {completion, text}, {better, worse}, {prompt, response}, {prompt, chosen, rejected} or "
    "{prompt, response, rating}, each with author"
)


def parse(row: Any, where: str = "") -> Request:
    """The request that a JSON object makes; `messages` is another name of `prompt`.

    Raises RefusedError naming the keys that are wrong, with `where` in front.
    """
    if not isinstance(row, dict):
        raise RefusedError(f"{where}expected a JSON object, found {type(row).__name__}")
    if "messages" in row and "prompt" not in row:
        row = {("prompt" if key == "messages" else key): value for key, value in row.items()}
    model = next((model for keys, model in _SHAPES if keys <= row.keys()), None)
    if model is None:
        found = ", ".join(islice(map(str, row), 20)) or "none"
        raise RefusedError(f"{where}no feedback has these keys ({printable(found)[:200]}); expected {_KNOWN}")
    try:
        return model.model_validate(row)
    except ValidationError as error:
        raise RefusedError(f"{where}{model.kind}: {_in_words(error)}") from error


def _in_words(error: ValidationError) -> str:
    wrong, found = [], error.errors(include_url=False, include_context=False, include_input=False)
    for each in found[:_MOST_NAMED]:
        place = ".".join(str(part) for part in each["loc"])
        wrong.append(f"{printable(place)[:80]}: {each['msg'].removeprefix('Value error, ')}")
    more = len(found) - _MOST_NAMED
    return "; ".join(wrong) + (f"; and {more} more" if more > 0 else "")


def author_of(name: str) -> str:
    """`name` as it is stored. Raises RefusedError where it is no name."""
    try:
        return _AUTHOR.validate_python(name)
    except ValidationError as error:
        raise RefusedError(f"author: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


_AUTHOR: TypeAdapter[str] = TypeAdapter(Author)
