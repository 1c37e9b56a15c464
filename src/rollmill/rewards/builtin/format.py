"""The format reward: a regular expression, tags, sections or a JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config.rewards import Reward
from rollmill.errors import ConfigError
from rollmill.rewards.base import NO_ANSWER, OK, TIMEOUT, Score, TagName, find_answer
from rollmill.rewards.text.json_schema import build_validator, check_schema, schema_text
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, last_code_block, run_large_in_thread, split_words
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.grader_pool import GraderPool

_AT_ONCE_S = 0.01
"""A pattern that takes longer is retried in a thread."""
_FORMS = ("pattern", "tags", "sections", "json_schema", "schema_column")
_HONOURED_BY = {
    "whole": ("pattern", "json_schema", "schema_column"),
    "time_limit_s": ("pattern", "json_schema", "schema_column"),
    "opened": ("tags",),
    "words": ("tags", "sections"),
    "partial": ("tags", "sections"),
}


class FormatReward(Reward):
    """1 if the completion has the required format: one of `pattern`, `tags`, `sections` and a JSON schema.

    `pattern` and `tags` read the whole text, so that they can ask for `<think>`; `sections` and JSON schemas the
    answer, without reasoning.
    """

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
    partial: bool = False
    """Give the fraction of satisfied rules instead of 0: one for each tag or section, one for the order and one for
    nothing outside the tags. Only with `tags` and `sections`."""
    time_limit_s: float = Field(1.0, gt=0)
    """Timeout of one completion, since some patterns take exponential time; the outcome is then `timeout`. Only with
    `pattern` and JSON schemas."""
    _matches: Callable[..., Any]
    _graders: GraderPool

    @field_validator("pattern")
    @classmethod
    def _is_regular(cls, value: str | None) -> str | None:
        if value is not None:
            import regex

            try:
                regex.compile(value)
            except (regex.error, RecursionError) as error:
                raise ValueError(f"not a regular expression: {error}; correct it") from error
        return value

    def extras(self) -> dict[str, tuple[str, str]]:
        keys = [key for key in ("json_schema", "schema_column") if getattr(self, key) is not None]
        return dict.fromkeys(keys[:1], ("schema", "jsonschema"))

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
            if getattr(self, key) != type(self).model_fields[key].default and given[0] not in modes:
                raise ValueError(f"{key} is honoured with {', '.join(modes)}, not with {given[0]}; remove it")
        for key in ("tags", "sections"):
            names = [name.casefold() for name in getattr(self, key)]
            if len(set(names)) < len(names):
                raise ValueError(f"{key} names one twice; each has to stand once")
        return self

    def check_tasks(self, tasks: Sequence[Task], name: str) -> None:
        column = self.schema_column
        if column is None:
            return
        for task in self.scored_tasks(tasks, name):
            if task.metadata.get(column) is not None:
                try:
                    build_validator(schema_text(task.metadata[column]))
                except ValueError as error:
                    raise ConfigError(f"task `{task.id}`, reward `{name}`: column {column}: {error}") from error

    def setup(self, resources: RewardResources) -> None:
        if self.pattern is not None:
            import regex

            pattern = regex.compile(self.pattern, regex.DOTALL)
            self._matches = pattern.fullmatch if self.whole else pattern.search
        elif self.mode not in ("tags", "sections"):
            from rollmill.rewards.worker_functions import SCHEMA

            check_schema(schema_text(self.json_schema or {}), self.name)
            self._graders = resources.graders_for(SCHEMA)

    async def score(self, task: Task, completion: Completion) -> Score:
        if self.mode == "pattern":
            return await self._match(completion.text)
        if self.mode in ("tags", "sections"):
            return await self._check_structure(completion)
        return await self._validate(task, completion)

    async def _match(self, text: str) -> Score:
        import asyncio

        try:
            found = self._matches(text, timeout=min(self.time_limit_s, _AT_ONCE_S))
        except TimeoutError:
            try:
                found = await asyncio.to_thread(self._matches, text, timeout=self.time_limit_s, concurrent=True)
            except TimeoutError:
                return Score(self.timeout_reward, TIMEOUT)
        return Score(float(found is not None))

    async def _check_structure(self, completion: Completion) -> Score:
        """Check tags in the whole text, because they may mark the reasoning, and sections in the answer."""
        text = completion.text if self.mode == "tags" else find_answer(completion)
        if text is None:
            return Score(0.0, NO_ANSWER)
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        if self.mode == "tags":
            text = f"<{self.tags[0]}>{text}" if self.opened else text
            rules = await run_large_in_thread(len(text), check_tags, text, self.tags, self.words)
        else:
            rules = await run_large_in_thread(len(text), check_sections, text, self.sections, self.words)
        return Score(sum(rules) / len(rules) if self.partial else float(all(rules)))

    async def _validate(self, task: Task, completion: Completion) -> Score:
        """Validate JSON in a grader process, since patterns can run for hours.

        Outcomes besides ok: `no_answer`, `not_json`, `invalid`, `too_long`, `timeout`, `memory`.
        """
        from rollmill.rewards.worker_functions import SCHEMA

        schema = self.json_schema if self.schema_column is None else task.metadata.get(self.schema_column)
        if schema is None:
            return Score(None)
        answer = find_answer(completion)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        if len(answer) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        text = answer if self.whole else last_code_block(answer) or answer
        reply = await self._graders.ask(SCHEMA, [(schema_text(schema), text)], self.time_limit_s)
        if reply.outcome != OK:
            earned = self.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Score(earned, reply.outcome, reply.queue_s, reply.run_s)
        outcome = {"1": OK, "0": "invalid"}.get(str(reply.value), "not_json")
        return Score(float(outcome == OK), outcome, reply.queue_s, reply.run_s)


# Checks of tags and section headings: which rules a text satisfies.

_WORDS = re.compile(r"\w")


def check_tags(text: str, tags: Sequence[str], fewest: int) -> list[bool]:
    """Return one rule per tag: opened once, then closed once, with `fewest` words inside.

    Then one for their order, without nesting, and one for no text outside.
    """
    marks = [
        (found[2], bool(found[1]), found.start(), found.end())
        for found in re.finditer(rf"<(/?)({'|'.join(map(re.escape, tags))})>", text)
    ]
    rules = []
    for tag in tags:
        tag_marks = [mark for mark in marks if mark[0] == tag]
        paired = [mark[1] for mark in tag_marks] == [False, True]
        rules.append(paired and _enough(text[tag_marks[0][3] : tag_marks[1][2]], fewest))
    in_order = [mark[:2] for mark in marks] == [(tag, closing) for tag in tags for closing in (False, True)]
    outside = _outside(text, [(mark[2], mark[3]) for mark in marks]) if in_order else "missing"
    return [*rules, in_order, not outside.strip()]


def _outside(text: str, marks: Sequence[tuple[int, int]]) -> str:
    """Return the text outside of pairs of marks."""
    edges = [
        0,
        *(edge for opening, closing in zip(marks[::2], marks[1::2], strict=True) for edge in (opening[0], closing[1])),
        len(text),
    ]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def check_sections(text: str, sections: Sequence[str], fewest: int) -> list[bool]:
    """Return one rule per section (its heading occurs once, with `fewest` words below), then one for their order."""
    wanted = {_folded(section): section for section in sections}
    lines = text.split("\n")
    places = [(number, name) for number, line in enumerate(lines) if (name := _heading(line)) in wanted]
    edges = [*places, (len(lines), "")]
    filled = {name: _enough("\n".join(lines[number + 1 : end]), fewest) for (number, name), (end, _) in pairwise(edges)}
    names = [name for _, name in places]
    rules = [names.count(name) == 1 and filled[name] for name in wanted]
    return [*rules, names == list(wanted)]


def _heading(line: str) -> str:
    """Return the name of a heading; empty if the line is not marked as one."""
    line = line.strip()
    marked = line.startswith(("#", "**", "__")) or line.endswith(":")
    return _folded(line) if marked and len(line) <= 200 else ""


def _folded(name: str) -> str:
    return " ".join(name.strip(" \t:*_#").casefold().split())


def _enough(text: str, fewest: int) -> bool:
    """True if there are `fewest` words, not counting punctuation."""
    return sum(1 for word in split_words(text) if _WORDS.match(word)) >= fewest
