"""The tool-call reward: calls must be JSON, name an existing tool and have arguments that match its schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.errors import ConfigError
from rollmill.files import parse_strict_json
from rollmill.rewards.base import NO_ANSWER, OK, TIMEOUT, Score, TextReward
from rollmill.rewards.text.json_schema import build_validator, check_schema, schema_text, validate_texts
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, last_code_block, run_large_in_thread
from rollmill.types import Completion, Task, ToolCall

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.grader_pool import GraderPool

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_REJECTED = "the task's column `tool_calls` has a call that its column `tools` rejects; correct one"
_NO_PARAMETERS = {"type": "object", "maxProperties": 0}


class ToolCallReward(TextReward):
    """Fraction of valid tool calls; if the task's column `tool_calls` lists the expected calls, F1 of the calls made.

    A call is valid if it is JSON, names a tool of the task's column `tools` and has arguments of its schema (extra
    `schema`). Calls in reasoning do not count. In chats, calls in the form of the model's own template count, whatever
    `syntax`, `after` and `tag` say.
    """

    needs_extra = ("schema", "jsonschema")
    largest = 1.0
    name: Literal["tool_call"]
    syntax: Literal["tags", "json"] = "tags"
    """`tags`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. `json`: the answer is one such object, a list
    of them, or a message with `tool_calls` as in the OpenAI API."""
    calls: int = Field(16, ge=1)
    """Maximum number of calls in one completion; more earn 0."""
    time_limit_s: float = Field(1.0, gt=0)
    """Timeout for checking the arguments of one completion; the outcome is then `timeout`."""
    _graders: GraderPool

    def check_tasks(self, tasks: Sequence[Task], name: str) -> None:
        """Refuse tasks whose columns `tools` and `tool_calls` it cannot use."""
        known: set[tuple[str, str]] = set()
        for task in self.scored_tasks(tasks, name):
            try:
                _check_tools(task, known)
            except ValueError as error:
                raise ConfigError(f"task `{task.id}`, reward `{name}`: {error}") from error

    def setup(self, resources: RewardResources) -> None:
        from rollmill.rewards.worker_functions import SCHEMA

        check_schema("{}", self.name)  # schemas come with the tasks, but jsonschema must be installed
        self._graders = resources.graders_for(SCHEMA)

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score of the calls that the model's chat renderer has found in its own form, or else of those in
        the answer; none for a task without the column `tools`.

        Outcomes besides ok: `no_answer`, `no_call`, `too_many`, `malformed`, `unknown_tool`, `bad_arguments`,
        `wrong_call`, `too_long`, `timeout`, `memory`.
        """
        column = _tools_column(task)
        if column is None:
            return Score(None)
        tools = read_tool_schemas(column)
        wanted = _wanted(task.metadata.get("tool_calls"), tools)
        found = await self._calls(completion)
        if isinstance(found, Score):
            return found
        if not found:
            return Score(1.0) if wanted == [] else Score(0.0, "no_call")
        if len(found) > self.calls:
            return Score(0.0, "too_many")
        return await self._score(found, tools, wanted)

    async def _calls(self, completion: Completion) -> list[ToolCall | None] | Score:
        """Return the calls, None for each malformed one; the score if there is no text to search."""
        reply = completion.reply
        if reply is not None and (reply.tool_calls or reply.malformed):
            return [*reply.tool_calls, *([None] * len(reply.malformed))]
        text = self.select_answer(completion)
        if text is None:
            return Score(0.0, NO_ANSWER)
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        parse = parse_tagged_calls if self.syntax == "tags" else parse_json_calls
        return await run_large_in_thread(len(text), parse, text)

    async def _score(self, found: list[ToolCall | None], tools: dict[str, str], wanted: list[ToolCall] | None) -> Score:
        from rollmill.rewards.worker_functions import SCHEMA

        known = [call for call in found if call is not None and call.name in tools]
        pairs = [(tools[call.name], json.dumps(call.arguments)) for call in [*(wanted or []), *known]]
        if not pairs:
            return Score(0.0, _outcome(found, known, []))
        reply = await self._graders.ask(SCHEMA, pairs, self.time_limit_s)
        if reply.outcome != OK:
            earned = self.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Score(earned, reply.outcome, reply.queue_s, reply.run_s)
        marks = str(reply.value)
        if set(marks[: len(wanted or [])]) - {"1"}:
            raise ValueError(_REJECTED)
        valid = [call for call, mark in zip(known, marks[len(wanted or []) :], strict=True) if mark == "1"]
        outcome, score = _outcome(found, known, valid), len(valid) / len(found)
        if wanted is not None:
            right = _in_common([_key(call) for call in valid], [_key(call) for call in wanted])
            score = 2 * right / (len(found) + len(wanted))
            outcome = "wrong_call" if outcome == OK and score < 1 else outcome
        return Score(score, outcome, reply.queue_s, reply.run_s)


def _outcome(found: list[ToolCall | None], known: list[ToolCall], valid: list[ToolCall]) -> str:
    if None in found:
        return "malformed"
    if len(known) < len(found):
        return "unknown_tool"
    return "bad_arguments" if len(valid) < len(known) else OK


def _tools_column(task: Task) -> Any:
    """Return the task's tools: its column `tools`, or the schemas that the prompt shows, from another column."""
    from rollmill.data.layouts import TOOLS

    own = task.metadata.get("tools")
    return task.metadata.get(TOOLS) if own is None else own


def read_tool_schemas(column: Any) -> dict[str, str]:
    """Return name -> schema (as text) of the arguments, from OpenAI's list of tools, which may be JSON text.

    Raises ValueError if it is invalid.
    """
    from rollmill.data.layouts import parsed

    tools: dict[str, str] = {}
    found = parsed(column)
    for each in found if isinstance(found, list | tuple) else [None]:
        entry = parsed(each)
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"the task's column `tools` has {entry!r:.80}; expected a list of "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )
        parameters = function.get("parameters")
        tools[function["name"]] = schema_text(_NO_PARAMETERS if parameters is None else parameters)
    return tools


def _wanted(column: Any, tools: Collection[str]) -> list[ToolCall] | None:
    from rollmill.data.layouts import parsed

    if column is None:
        return None
    found = parsed(column)
    calls = [_call(parsed(entry)) for entry in found] if isinstance(found, list) else [None]
    if None in calls:
        raise ValueError(
            f"the task's column `tool_calls` is {column!r:.80}; expected a list of "
            '{"name": ..., "arguments": {...}}'
        )
    wanted = [call for call in calls if call is not None]
    if missing := sorted({call.name for call in wanted} - set(tools)):
        raise ValueError(f"the task's column `tool_calls` names {missing}, which its column `tools` lacks")
    return wanted


def parse_tagged_calls(text: str) -> list[ToolCall | None]:
    """Return the calls in <tool_call> tags; None for each invalid or unclosed one."""
    _, *rest = text.split(_OPENING)
    stray = text.count(_CLOSING) - sum(_CLOSING in part for part in rest)
    found: list[ToolCall | None] = [None] * stray
    for part in rest:
        inside, closed, _ = part.partition(_CLOSING)
        found.append(_parsed_call(inside) if closed else None)
    return found


def parse_json_calls(text: str) -> list[ToolCall | None]:
    """Return the calls of a text, or of its last fenced block, that is JSON as a whole.

    Empty if the text does not begin like a JSON object or list: that is not an attempt at a call.
    """
    text = (last_code_block(text) or text).strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        value = parse_strict_json(text)
    except ValueError:
        return [None]
    if isinstance(value, dict) and "tool_calls" in value:
        value = value["tool_calls"] or []
    return [_call(entry) for entry in (value if isinstance(value, list) else [value])]


def _parsed_call(text: str) -> ToolCall | None:
    try:
        return _call(parse_strict_json(text))
    except ValueError:
        return None


def _call(entry: Any) -> ToolCall | None:
    """Parse a call as {name, arguments}, or inside `function`; the arguments may be an object or its JSON text."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_strict_json(arguments)
        except ValueError:
            return None
    return ToolCall("", function["name"], dict(arguments)) if isinstance(arguments, Mapping) else None


def _key(call: ToolCall) -> str:
    """Return a key that is equal for equal calls: numbers by value, objects without regard to order."""
    return f"{call.name} {json.dumps(_plain(call.arguments), sort_keys=True)}"


def _plain(value: Any) -> Any:
    """Return the value with whole floats as integers, so that 1.0 equals 1, and True does not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _in_common(one: list[str], other: list[str]) -> int:
    left = list(other)
    for key in one:
        if key in left:
            left.remove(key)
    return len(other) - len(left)


def _check_tools(task: Task, known: set[tuple[str, str]]) -> None:
    """Raise ValueError if the reward cannot score a task because of its columns `tools` and `tool_calls`.

    Args:
        known: schemas, and schemas with arguments, that are right; those of this task are added. Building the
            validator of a schema takes milliseconds, and tasks share their tools.
    """
    column = _tools_column(task)
    if column is None:
        return
    tools = read_tool_schemas(column)
    wanted = _wanted(task.metadata.get("tool_calls"), tools) or []
    for schema in tools.values():
        if (schema, "") not in known:
            build_validator(schema)
    calls = {(tools[call.name], json.dumps(call.arguments)) for call in wanted} - known
    if set(validate_texts(list(calls))) - {"1"}:
        raise ValueError(_REJECTED)
    known |= calls | {(schema, "") for schema in tools.values()}
