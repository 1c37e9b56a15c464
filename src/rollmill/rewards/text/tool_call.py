"""The tool-call reward: calls that are JSON, name a tool that exists and have arguments of its schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.config.rewards import ToolCallReward
from rollmill.core.types import Completion, Task
from rollmill.core.user_files import strict_json
from rollmill.rewards.base import OK, TIMEOUT, Verdict
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.text.reading import LONGEST_TEXT, aside, judged_part, last_fenced
from rollmill.rewards.text.schemas import check_schema, schema_text

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_NO_PARAMETERS = {"type": "object", "maxProperties": 0}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is a JSON object."""

    name: str
    arguments: dict[str, Any]

    def key(self) -> str:
        """Equal for equal calls: numbers by value, objects without regard to order."""
        return f"{self.name} {json.dumps(_plain(self.arguments), sort_keys=True)}"


class ToolCall:
    """From 0 to 1. A task without the column `tools` is not judged.

    Outcomes besides ok: `no_answer`, `no_call`, `too_many`, `malformed`, `unknown_tool`, `bad_arguments`, `wrong_call`,
    `too_long`, `timeout`, `memory`.
    """

    def __init__(self, config: ToolCallReward, graders: GraderPool) -> None:
        check_schema("{}", config.name)  # schemas come with the tasks, but jsonschema has to be there
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        if task.metadata.get("tools") is None:
            return Verdict(None)
        tools = tools_of(task.metadata["tools"])
        wanted = _wanted(task.metadata.get("tool_calls"), tools)
        text = judged_part(completion.text, self._config)
        if text is None:
            return Verdict(0.0, "no_answer")
        if len(text) > LONGEST_TEXT:
            return Verdict(0.0, "too_long")
        found = await aside(len(text), tagged_calls if self._config.syntax == "tags" else json_calls, text)
        if not found:
            return Verdict(1.0) if wanted == [] else Verdict(0.0, "no_call")
        if len(found) > self._config.calls:
            return Verdict(0.0, "too_many")
        return await self._scored(found, tools, wanted)

    async def _scored(self, found: list[Call | None], tools: dict[str, str], wanted: list[Call] | None) -> Verdict:
        known = [call for call in found if call is not None and call.name in tools]
        pairs = [(tools[call.name], json.dumps(call.arguments)) for call in [*(wanted or []), *known]]
        if not pairs:
            return Verdict(0.0, _outcome(found, known, []))
        reply = await self._graders.ask("schema", pairs, self._config.time_limit_s)
        if reply.outcome != OK:
            earned = self._config.timeout_reward if reply.outcome == TIMEOUT else 0.0
            return Verdict(earned, reply.outcome, reply.queued, reply.worked)
        marks = str(reply.value)
        if set(marks[: len(wanted or [])]) - {"1"}:
            raise ValueError("the task's column `tool_calls` wants a call that its column `tools` refuses; correct one")
        valid = [call for call, mark in zip(known, marks[len(wanted or []) :], strict=True) if mark == "1"]
        outcome, score = _outcome(found, known, valid), len(valid) / len(found)
        if wanted is not None:
            right = _in_common([call.key() for call in valid], [call.key() for call in wanted])
            score = 2 * right / (len(found) + len(wanted))
            outcome = "wrong_call" if outcome == OK and score < 1 else outcome
        return Verdict(score, outcome, reply.queued, reply.worked)


def _outcome(found: list[Call | None], known: list[Call], valid: list[Call]) -> str:
    if None in found:
        return "malformed"
    if len(known) < len(found):
        return "unknown_tool"
    return "bad_arguments" if len(valid) < len(known) else OK


def tools_of(column: Any) -> dict[str, str]:
    """Name -> schema (as text) of its arguments, from OpenAI's list of tools. Raises ValueError where it is not one."""
    tools: dict[str, str] = {}
    entries = column if isinstance(column, Sequence) and not isinstance(column, str) else [None]
    for entry in entries:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"the task's column `tools` has {entry!r:.80}; expected a list of "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )
        parameters = function.get("parameters")
        tools[function["name"]] = schema_text(_NO_PARAMETERS if parameters is None else parameters)
    return tools


def _wanted(column: Any, tools: Collection[str]) -> list[Call] | None:
    if column is None:
        return None
    calls = [_call(entry) for entry in column] if isinstance(column, list) else [None]
    if None in calls:
        raise ValueError(
            f"the task's column `tool_calls` is {column!r:.80}; expected a list of "
            '{"name": ..., "arguments": {...}}'
        )
    wanted = [call for call in calls if call is not None]
    if missing := sorted({call.name for call in wanted} - set(tools)):
        raise ValueError(f"the task's column `tool_calls` wants {missing}, which its column `tools` has not")
    return wanted


def tagged_calls(text: str) -> list[Call | None]:
    """What stands between <tool_call> tags; None for each call that is none, an unclosed one included."""
    _, *rest = text.split(_OPENING)
    stray = text.count(_CLOSING) - sum(_CLOSING in part for part in rest)
    found: list[Call | None] = [None] * stray
    for part in rest:
        inside, closed, _ = part.partition(_CLOSING)
        found.append(_parsed_call(inside) if closed else None)
    return found


def json_calls(text: str) -> list[Call | None]:
    """The calls of a text, or of its last fenced block, that is JSON as a whole.

    Nothing for what does not begin like a JSON object or list: that is no attempt at a call.
    """
    text = (last_fenced(text) or text).strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        value = strict_json(text)
    except ValueError:
        return [None]
    if isinstance(value, dict) and "tool_calls" in value:
        value = value["tool_calls"] or []
    return [_call(entry) for entry in (value if isinstance(value, list) else [value])]


def _parsed_call(text: str) -> Call | None:
    try:
        return _call(strict_json(text))
    except ValueError:
        return None


def _call(entry: Any) -> Call | None:
    """A call as {name, arguments}, or inside `function`; the arguments may be an object or JSON text of one."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except ValueError:
            return None
    return Call(function["name"], dict(arguments)) if isinstance(arguments, Mapping) else None


def _plain(value: Any) -> Any:
    """The value with whole floats as integers, so that 1.0 is 1, and True is not."""
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
