"""The format reward: a regular expression, tags, sections or a JSON Schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import pairwise

import regex

from rollmill.config.rewards.text import ExactReward, FormatReward
from rollmill.rewards.base import NO_ANSWER, OK, TIMEOUT, Reward, Score, find_answer
from rollmill.rewards.resources import RewardResources
from rollmill.rewards.text.json_schema import check_schema, schema_text
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, last_code_block, run_large_in_thread, split_words
from rollmill.rewards.worker_functions import SCHEMA
from rollmill.types import Completion, Task
from rollmill_grading.grader_pool import GraderPool

# The exact-match reward.


class ExactScorer:
    """1 if the answer string equals the reference string, else 0. A task without an answer has no reward."""

    def __init__(self, config: ExactReward) -> None:
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        if task.answer is None:
            return Score(None)
        answer = find_answer(completion, self._config.after)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        return Score(float(self._folded(answer) == self._folded(str(task.answer))), OK)

    def _folded(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text


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


def build_format_scorer(config: FormatReward, resources: RewardResources) -> Reward:
    """Build the reward of the configured mode. Raises ConfigError if a schema cannot be used."""
    if config.mode == "pattern":
        return PatternScorer(config)
    if config.mode in ("tags", "sections"):
        return StructureScorer(config)
    check_schema(schema_text(config.json_schema or {}), config.name)
    return JSONSchemaScorer(config, resources.graders_for(SCHEMA))


_AT_ONCE_S = 0.01
"""A pattern that takes longer is retried in a thread."""


class PatternScorer:
    """1 if the whole text of the completion, reasoning included, matches a regular expression, else 0."""

    def __init__(self, config: FormatReward) -> None:
        assert config.pattern is not None
        pattern = regex.compile(config.pattern, regex.DOTALL)
        self._matches = pattern.fullmatch if config.whole else pattern.search
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        limit = self._config.time_limit_s
        try:
            found = self._matches(completion.text, timeout=min(limit, _AT_ONCE_S))
        except TimeoutError:
            try:
                found = await asyncio.to_thread(self._matches, completion.text, timeout=limit, concurrent=True)
            except TimeoutError:
                return Score(self._config.timeout_reward, TIMEOUT)
        return Score(float(found is not None))


class StructureScorer:
    """1 if all tags or sections are right; else 0, or with `partial` the share of satisfied rules.

    Tags stand in the whole text, because they may mark the reasoning; sections in the answer.
    """

    def __init__(self, config: FormatReward) -> None:
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config
        text = completion.text if config.mode == "tags" else find_answer(completion)
        if text is None:
            return Score(0.0, NO_ANSWER)
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        if config.mode == "tags":
            text = f"<{config.tags[0]}>{text}" if config.opened else text
            rules = await run_large_in_thread(len(text), check_tags, text, config.tags, config.words)
        else:
            rules = await run_large_in_thread(len(text), check_sections, text, config.sections, config.words)
        return Score(sum(rules) / len(rules) if config.partial else float(all(rules)))


class JSONSchemaScorer:
    """1 if the JSON of the answer matches the schema, else 0. It is validated in a grader process: patterns can run for
    hours.

    Outcomes besides ok: `no_answer`, `not_json`, `invalid`, `too_long`, `timeout`, `memory`.
    """

    def __init__(self, config: FormatReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config
        schema = config.json_schema if config.schema_column is None else task.metadata.get(config.schema_column)
        if schema is None:
            return Score(None)
        answer = find_answer(completion)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        if len(answer) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        text = answer if config.whole else last_code_block(answer) or answer
        reply = await self._graders.ask(SCHEMA, [(schema_text(schema), text)], config.time_limit_s)
        if reply.outcome != OK:
            earned = config.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Score(earned, reply.outcome, reply.queue_s, reply.run_s)
        outcome = {"1": OK, "0": "invalid"}.get(str(reply.value), "not_json")
        return Score(float(outcome == OK), outcome, reply.queue_s, reply.run_s)
