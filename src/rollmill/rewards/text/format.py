"""The format reward: a regular expression, tags, sections or a JSON Schema."""

from __future__ import annotations

import asyncio

import regex

from rollmill.config.rewards import FormatReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, TIMEOUT, Reward, Verdict
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.resources import Resources
from rollmill.rewards.text.reading import LONGEST_TEXT, aside, last_fenced
from rollmill.rewards.text.schemas import check_schema, schema_text
from rollmill.rewards.text.structure import sections_right, tags_right


def format_reward(config: FormatReward, resources: Resources) -> Reward:
    """The reward for the form that is asked for. Raises ConfigError where a schema cannot be used."""
    if config.mode == "pattern":
        return Pattern(config)
    if config.mode in ("tags", "sections"):
        return Structure(config)
    check_schema(schema_text(config.json_schema or {}), config.name)
    return Schema(config, resources.graders)


_AT_ONCE_S = 0.01
"""A pattern that takes longer is tried again in a thread."""


class Pattern:
    """1 if the completion matches a regular expression, else 0."""

    def __init__(self, config: FormatReward) -> None:
        assert config.pattern is not None
        pattern = regex.compile(config.pattern, regex.DOTALL)
        self._matches = pattern.fullmatch if config.whole else pattern.search
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        limit = self._config.time_limit_s
        try:
            found = self._matches(completion.text, timeout=min(limit, _AT_ONCE_S))
        except TimeoutError:
            try:
                found = await asyncio.to_thread(self._matches, completion.text, timeout=limit, concurrent=True)
            except TimeoutError:
                return Verdict(self._config.timeout_reward, TIMEOUT)
        return Verdict(float(found is not None))


class Structure:
    """1 if all tags or sections are right; else 0, or with `partial` the share of the rules that hold."""

    def __init__(self, config: FormatReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config, text = self._config, completion.text
        if len(text) > LONGEST_TEXT:
            return Verdict(0.0, "too_long")
        if config.mode == "tags":
            text = f"<{config.tags[0]}>{text}" if config.opened else text
            rules = await aside(len(text), tags_right, text, config.tags, config.words)
        else:
            rules = await aside(len(text), sections_right, text, config.sections, config.words)
        return Verdict(sum(rules) / len(rules) if config.partial else float(all(rules)))


class Schema:
    """1 if the JSON is what the schema says, else 0. It is checked in a grader process: patterns can run for hours.

    Outcomes besides ok: `not_json`, `invalid`, `too_long`, `timeout`, `memory`.
    """

    def __init__(self, config: FormatReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config
        schema = config.json_schema if config.schema_column is None else task.metadata.get(config.schema_column)
        if schema is None:
            return Verdict(None)
        if len(completion.text) > LONGEST_TEXT:
            return Verdict(0.0, "too_long")
        text = completion.text if config.whole else last_fenced(completion.text) or completion.text
        reply = await self._graders.ask("schema", [(schema_text(schema), text)], config.time_limit_s)
        if reply.outcome != OK:
            earned = config.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Verdict(earned, reply.outcome, reply.queued, reply.worked)
        outcome = {"1": OK, "0": "invalid"}.get(str(reply.value), "not_json")
        return Verdict(float(outcome == OK), outcome, reply.queued, reply.worked)
