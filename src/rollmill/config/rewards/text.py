"""`rewards`: rules on the text of a completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.rewards.base import RewardSection

TagName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")]


class TextReward(RewardSection):
    """Keys of rewards that can judge a part of the text."""

    after: str | None = None
    """Judge only what follows the last occurrence of this text, for example "Answer:"."""
    tag: TagName | None = None
    """Judge only what stands inside the last `<tag>...</tag>`: give the name alone, for example `answer`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.after is not None and self.tag is not None:
            raise ValueError("after and tag both say where to look; give one of them")
        return self


class ExactReward(RewardSection):
    """1 if the answer string equals the reference string."""

    name: Literal["exact"]
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    after: str | None = None
    """Compare only what follows the last occurrence of this text, for example "Answer:"."""


class FormatReward(RewardSection):
    """1 if the completion has the form that one of `pattern`, `tags`, `sections` and a JSON schema asks for."""

    name: Literal["format"]
    pattern: str | None = None
    """Regular expression (Python's syntax, DOTALL) that must match."""
    tags: list[TagName] = []
    """Tags that must each stand once, closed, in this order, with text inside and nothing outside."""
    sections: list[Annotated[str, Field(pattern=r"\S")]] = []
    """Headings that must each stand once on a line of their own, in this order, with text below: `## Plan`, `**Plan**`
    or `Plan:`."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema of the completion, or of its last fenced block (extra `schema`). A `$ref` points only inside
    it, and the keyword `format` is not checked."""
    schema_column: str | None = None
    """Column of the task with such a schema; tasks without one are not judged."""
    whole: bool = False
    """Match the whole completion instead of anywhere in it. Only with `pattern` and JSON schemas."""
    opened: bool = False
    """The prompt ends with the first tag opened, so that the completion begins inside it. Only with `tags`."""
    words: int = Field(1, ge=1)
    """Fewest words inside each tag and section. Only with `tags` and `sections`."""
    partial: bool = False
    """Give the share of rules kept instead of 0: one for each tag or section, one for the order and one for nothing
    outside the tags. Only with `tags` and `sections`."""
    time_limit_s: float = Field(1.0, gt=0)
    """Hard limit for one completion; some patterns take exponential time. Past it the outcome is `timeout`. Only with
    `pattern` and JSON schemas."""

    @property
    def mode(self) -> str:
        """Which key says what the form is."""
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
    """Whether a key has another value than its default: a resolved run file gives all of them."""
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
    """Share of the words that are in the language wanted (DeepSeek-R1). Code, formulas and tags are left out."""

    name: Literal["language"]
    language: str = Field("prompt", pattern=r"^(prompt|[a-z]{2,3})$")
    """ISO 639 code, for example `en` or `zh`; `prompt` is the language of the task's prompt."""
    method: Literal["script", "identify"] = "script"
    """`script` looks at the alphabet of each word, which tells English from Chinese, not from French. `identify` also
    guesses the language of every 16 words of one alphabet (extra `language`)."""


class LengthReward(RewardSection):
    """A reward for shorter completions, in tokens (in words where a completion has no tokens)."""

    name: Literal["length"]
    kind: Literal["kimi", "overlong", "target"]
    """`kimi`: within a group, from .5 for the shortest to -.5 for the longest; at most 0 for wrong ones. `overlong`
    (DAPO): 0, then falling to -1 over the last `buffer` tokens before `longest`. `target`: 1 at the task's column
    `target_length`, falling to 0 at twice that length and at none."""
    correct: str | None = None
    """Which reward says whether a completion is correct, as in `math` or `python_function/part`. Only with `kimi`."""
    threshold: float = 1.0
    """What that reward has to reach, before its weight. Only with `kimi`."""
    longest: int | None = Field(None, ge=1)
    """L_max, usually rollout.max_new_tokens. Only with `overlong`."""
    buffer: int | None = Field(None, ge=1)
    """L_c, over how many tokens the penalty grows; published: a fifth of `longest`. Only with `overlong`."""
    target: int | None = Field(None, ge=1)
    """The length wanted of tasks without a column `target_length`. Only with `target`."""

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
    """From 0 to -1: the share of n-grams that stood before, or the share of the text that is a loop at its end."""

    name: Literal["repetition"]
    ngram: int = Field(8, ge=1)
    """Length of an n-gram, in tokens (in words where a completion has no tokens)."""
    free: float = Field(0.0, ge=0, lt=1)
    """Share that costs nothing; what is above it is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """How often a stretch has to stand at the end, one right after the other, to be a loop."""
    loop_tokens: int = Field(32, ge=2)
    """Fewest tokens of a loop, all its rounds together."""


class CitationReward(TextReward):
    """How well the facts of the task's column `facts` are cited, as in [1] or [doc:3], from 0 to 1.

    Precision where the column `citations` does not say which have to be cited, else F1. Invented ids and quotations
    that do not stand in the fact count as wrong citations.
    """

    name: Literal["citation"]
    quotes: Literal["check", "require", "ignore"] = "check"
    """Text in quotation marks right before a citation must stand in the fact that is cited. `require`: a citation
    without such a quotation is wrong."""
    quote_words: int = Field(3, ge=1)
    """A quotation has at least this many words; shorter ones are not looked at."""


class ToolCallReward(TextReward):
    """Share of valid tool calls; where the task's column `tool_calls` says which are wanted, F1 of those made.

    A call is valid if it is JSON, names a tool of the task's column `tools` and has arguments of its schema (extra
    `schema`).
    """

    name: Literal["tool_call"]
    syntax: Literal["tags", "json"] = "tags"
    """`tags`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. `json`: the text is one such object, a list
    of them, or a message with `tool_calls` as of the OpenAI interface."""
    calls: int = Field(16, ge=1)
    """Most calls in one completion; one with more earns 0."""
    time_limit_s: float = Field(1.0, gt=0)
    """Hard limit for checking the arguments of one completion; past it the outcome is `timeout`."""
