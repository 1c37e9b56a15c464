"""The format reward: a regular expression, tags, sections or a JSON Schema."""

from __future__ import annotations

import asyncio

import regex

from rollmill.config.rewards import FormatReward
from rollmill.rewards.base import OK, TIMEOUT, Reward, Score
from rollmill.rewards.grader_pool import GraderPool
from rollmill.rewards.resources import RewardResources
from rollmill.rewards.text.json_schema import check_schema, schema_text
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, last_code_block, run_large_in_thread
from rollmill.rewards.text.structure import check_sections, check_tags
from rollmill.types import Completion, Task


def build_format_scorer(config: FormatReward, resources: RewardResources) -> Reward:
    """The reward for the form that is asked for. Raises ConfigError where a schema cannot be used."""
    if config.mode == "pattern":
        return PatternScorer(config)
    if config.mode in ("tags", "sections"):
        return StructureScorer(config)
    check_schema(schema_text(config.json_schema or {}), config.name)
    return JSONSchemaScorer(config, resources.graders)


_AT_ONCE_S = 0.01
"""A pattern that takes longer is tried again in a thread."""


class PatternScorer:
    """1 if the completion matches a regular expression, else 0."""

    def __init__(self, config: FormatReward) -> None:
        assert config.pattern is not None
        pattern = regex.compile(config.pattern, regex.DOTALL)
        self._matches = pattern.fullmatch if config.whole else pattern.search
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
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
    """1 if all tags or sections are right; else 0, or with `partial` the share of the rules that hold."""

    def __init__(self, config: FormatReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
        config, text = self._config, completion.text
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        if config.mode == "tags":
            text = f"<{config.tags[0]}>{text}" if config.opened else text
            rules = await run_large_in_thread(len(text), check_tags, text, config.tags, config.words)
        else:
            rules = await run_large_in_thread(len(text), check_sections, text, config.sections, config.words)
        return Score(sum(rules) / len(rules) if config.partial else float(all(rules)))


class JSONSchemaScorer:
    """1 if the JSON is what the schema says, else 0. It is checked in a grader process: patterns can run for hours.

    Outcomes besides ok: `not_json`, `invalid`, `too_long`, `timeout`, `memory`.
    """

    def __init__(self, config: FormatReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Score:
        config = self._config
        schema = config.json_schema if config.schema_column is None else task.metadata.get(config.schema_column)
        if schema is None:
            return Score(None)
        if len(completion.text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        text = completion.text if config.whole else last_code_block(completion.text) or completion.text
        reply = await self._graders.ask("schema", [(schema_text(schema), text)], config.time_limit_s)
        if reply.outcome != OK:
            earned = config.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Score(earned, reply.outcome, reply.queue_s, reply.run_s)
        outcome = {"1": OK, "0": "invalid"}.get(str(reply.value), "not_json")
        return Score(float(outcome == OK), outcome, reply.queue_s, reply.run_s)
