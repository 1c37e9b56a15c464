"""`rewards`: rules on the text of a completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import regex
from pydantic import Field, field_validator, model_validator

from rollmill.config.rewards.base import RewardSection

TagName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")]


class TextReward(RewardSection):
    """Base of rewards that can score a part of the text they read: the answer, or the whole text of `language`."""

    after: str | None = None
    """Score only what follows the last occurrence of this text, for example "Answer:"."""
    tag: TagName | None = None
    """Score only the text inside the last `<tag>...</tag>`; give the name alone, for example `answer`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.after is not None and self.tag is not None:
            raise ValueError("after and tag both say where to look; give one of them")
        return self


class ExactReward(RewardSection):
    """1 if the answer, without reasoning, equals the reference string, else 0."""

    implementation = "rollmill.rewards.text.format:ExactScorer"
    decides = True
    largest = 1.0
    name: Literal["exact"]
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    after: str | None = None
    """Compare only what follows the last occurrence of this text, for example "Answer:"."""


class FormatReward(RewardSection):
    """1 if the completion has the required format: one of `pattern`, `tags`, `sections` and a JSON schema.

    `pattern` and `tags` read the whole text, so that they can ask for `<think>`; `sections` and JSON schemas the
    answer, without reasoning.
    """

    implementation = "rollmill.rewards.text.format:build_format_scorer"
    largest = 1.0
    name: Literal["format"]
    pattern: str | None = None
    """Regular expression (Python's syntax, DOTALL) that must match."""
    tags: list[TagName] = []
    """Tags that must each appear once, closed, in this order, with text inside and nothing outside."""
    sections: list[Annotated[str, Field(pattern=r"\S")]] = []
    """Headings that must each appear once on their own line, in this order, with text below: `## Plan`, `**Plan**` or
    `Plan:`."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema of the answer, or of its last fenced block (extra `schema`). A `$ref` may only refer to the
    schema itself, and the keyword `format` is not checked."""
    schema_column: str | None = None
    """Column of the task with such a schema; the reward does not apply to tasks without one."""
    whole: bool = False
    """Match the whole text (of a JSON schema: the whole answer) instead of anywhere in it. Only with `pattern` and JSON
    schemas."""
    opened: bool = False
    """The prompt ends with the opening first tag, so the completion starts inside it. Only with `tags`."""
    words: int = Field(1, ge=1)
    """Minimum number of words inside each tag and section. Only with `tags` and `sections`."""

    def extras(self) -> dict[str, tuple[str, str]]:
        keys = [key for key in ("json_schema", "schema_column") if getattr(self, key) is not None]
        return dict.fromkeys(keys[:1], ("schema", "jsonschema"))

    @field_validator("pattern")
    @classmethod
    def _is_regular(cls, value: str | None) -> str | None:
        try:
            regex.compile(value or "")
        except (regex.error, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}; correct it") from error
        return value

    partial: bool = False
    """Give the fraction of satisfied rules instead of 0: one for each tag or section, one for the order and one for
    nothing outside the tags. Only with `tags` and `sections`."""
    time_limit_s: float = Field(1.0, gt=0)
    """Timeout of one completion, since some patterns take exponential time; the outcome is then `timeout`. Only with
    `pattern` and JSON schemas."""

    @property
    def mode(self) -> str:
        """Key that defines the format."""
        return next(key for key in _FORMS if getattr(self, key) not in (None, []))

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [key for key in _FORMS if getattr(self, key) not in (None, [])]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of {', '.join(_FORMS)} (found {found})")
        for key, modes in _HONOURED_BY.items():
            if _changed(self, key) and given[0] not in modes:
                raise ValueError(f"{key} is honoured with {', '.join(modes)}, not with {given[0]}; remove it")
        for key in ("tags", "sections"):
            names = [name.casefold() for name in getattr(self, key)]
            if len(set(names)) < len(names):
                raise ValueError(f"{key} names one twice; each has to stand once")
        return self


def _changed(section: RewardSection, key: str) -> bool:
    """Returns whether a key differs from its default. A resolved run file sets all keys."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


_FORMS = ("pattern", "tags", "sections", "json_schema", "schema_column")
_HONOURED_BY = {
    "whole": ("pattern", "json_schema", "schema_column"),
    "time_limit_s": ("pattern", "json_schema", "schema_column"),
    "opened": ("tags",),
    "words": ("tags", "sections"),
    "partial": ("tags", "sections"),
}


class LanguageReward(TextReward):
    """Fraction of words in the target language (DeepSeek-R1), in the whole text: reasoning counts. Code, formulas and
    tags are ignored."""

    implementation = "rollmill.rewards.text.language:LanguageScorer"
    largest = 1.0
    name: Literal["language"]
    language: str = Field("prompt", pattern=r"^(prompt|[a-z]{2,3})$")
    """ISO 639 code, for example `en` or `zh`; `prompt` is the language of the task's prompt."""
    method: Literal["script", "identify"] = "script"
    """`script` checks the alphabet of each word, which distinguishes English from Chinese but not from French.
    `identify` also detects the language of every 16 words of one alphabet (extra `language`)."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"method": ("language", "py3langid")} if self.method == "identify" else {}


class LengthReward(RewardSection):
    """Length reward in tokens of the whole completion, reasoning included (in words if a completion has no tokens)."""

    implementation = "rollmill.rewards.text.length:build_length_scorer"
    name: Literal["length"]
    kind: Literal["kimi", "overlong", "target"]
    """`kimi`: within a group, from .5 for the shortest to -.5 for the longest; at most 0 for wrong ones. `overlong`
    (DAPO): 0, then falling to -1 over the last `buffer` tokens before `longest`. `target`: 1 at the task's column
    `target_length`, falling to 0 at twice that length and at length 0."""
    correct: str | None = None
    """Name of the reward that decides whether a completion is correct, such as `math` or `python_function/part`. Only
    with `kimi`."""
    threshold: float = 1.0
    """Minimum of that reward for a correct completion, before its weight. Only with `kimi`."""
    longest: int | None = Field(None, ge=1)
    """Maximum length (L_max), usually rollout.max_new_tokens. Only with `overlong`."""
    buffer: int | None = Field(None, ge=1)
    """Number of tokens over which the penalty grows (L_cache); published: a fifth of `longest`. Only with
    `overlong`."""
    target: int | None = Field(None, ge=1)
    """Target length of tasks without a column `target_length`. Only with `target`."""

    @property
    def largest(self) -> float:  # type: ignore[override]
        """Largest value: by kind."""
        return {"kimi": 0.5, "overlong": 0.0, "target": 1.0}[self.kind]

    @model_validator(mode="after")
    def _of_the_kind(self) -> Self:
        keys = {"kimi": ("correct", "threshold"), "overlong": ("longest", "buffer"), "target": ("target",)}
        for kind, own in keys.items():
            for key in own:
                if kind != self.kind and _changed(self, key):
                    raise ValueError(f"{key} is honoured by kind {kind}, not by {self.kind}; remove it")
        if self.kind == "kimi" and self.correct is None:
            raise ValueError("which reward says that a completion is correct? Give its name as correct, as in math")
        if self.kind == "overlong":
            if self.longest is None or self.buffer is None:
                raise ValueError("kind overlong needs longest and buffer, as in longest: 1024, buffer: 200")
            if self.buffer > self.longest:
                raise ValueError(f"buffer ({self.buffer}) is above longest ({self.longest}); lower it")
        return self


class RepetitionReward(RewardSection):
    """From 0 to -1: the fraction of repeated n-grams, or the fraction of the text in a loop at its end. Reads the whole
    text, reasoning included."""

    implementation = "rollmill.rewards.text.repetition:RepetitionScorer"
    largest = 0.0
    name: Literal["repetition"]
    ngram: int = Field(8, ge=1)
    """Length of an n-gram in tokens (in words if a completion has no tokens)."""
    free: float = Field(0.0, ge=0, lt=1)
    """Fraction without a penalty; the rest is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """Minimum number of consecutive repeats of a loop at the end."""
    loop_tokens: int = Field(32, ge=2)
    """Minimum number of tokens of all repeats together."""


class CitationReward(TextReward):
    """Citation quality of the answer from 0 to 1: citations such as [1] or [doc:3] of the facts in the task's column
    `facts`.

    Precision if the column `citations` does not list the required citations, else F1. Invented ids, and quotations that
    do not appear in the fact, count as wrong citations.
    """

    implementation = "rollmill.rewards.text.citation:CitationScorer"
    largest = 1.0
    name: Literal["citation"]
    quotes: Literal["check", "require", "ignore"] = "check"
    """Quoted text right before a citation must appear in the cited fact. `require`: a citation without such a quotation
    is wrong."""
    quote_words: int = Field(3, ge=1)
    """Minimum words of a quotation; shorter ones are ignored."""


class ToolCallReward(TextReward):
    """Fraction of valid tool calls; if the task's column `tool_calls` lists the expected calls, F1 of the calls made.

    A call is valid if it is JSON, names a tool of the task's column `tools` and has arguments of its schema (extra
    `schema`). Calls in reasoning do not count. In chats, calls in the form of the model's own template count, whatever
    `syntax`, `after` and `tag` say.
    """

    needs_extra = ("schema", "jsonschema")
    implementation = "rollmill.rewards.text.tool_call:ToolCallScorer"
    largest = 1.0
    name: Literal["tool_call"]
    syntax: Literal["tags", "json"] = "tags"
    """`tags`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. `json`: the answer is one such object, a list
    of them, or a message with `tool_calls` as in the OpenAI API."""
    calls: int = Field(16, ge=1)
    """Maximum number of calls in one completion; more earn 0."""
    time_limit_s: float = Field(1.0, gt=0)
    """Timeout for checking the arguments of one completion; the outcome is then `timeout`."""
