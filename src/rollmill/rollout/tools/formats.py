"""Formats of tool calls, tool descriptions and results in text.

Two formats of calls. `hermes`, also used by Qwen's models (https://github.com/NousResearch/Hermes-Function-Calling):

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "17*23"}}
    </tool_call>

`json`: a call `{"name": ..., "arguments": {...}}`, or a list of calls, as the whole text or in fenced blocks. `tool`
may replace `name`, and `parameters` (as in Llama 3.1) or `args` may replace `arguments`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollmill.files import parse_strict_json
from rollmill.types import ParsedReply, ToolCall

ToolFormat = Literal["auto", "hermes", "json"]
"""Format of calls; `auto` is hermes if its tags appear, else json."""

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_NAMES, _ARGUMENTS = ("name", "tool", "function"), ("arguments", "args", "parameters")
_THOUGHTS_END = "</think>"
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n(.*?)```", re.DOTALL)
_ATTEMPT = re.compile(rf'\[?\s*{{\s*"(?:{"|".join(_NAMES)})"\s*:')
_ID_LENGTH = 9  # Mistral's templates require ids of nine letters and digits


def split_tool_calls(text: str, format: ToolFormat = "auto", *, salt: str = "") -> tuple[str, list[ToolCall]]:
    """Return the text around the calls, and the calls; see `parse_tool_calls`."""
    reading = parse_tool_calls(text, format, salt=salt)
    return reading.content, reading.tool_calls


def parse_tool_calls(text: str, format: ToolFormat = "auto", *, salt: str = "") -> ParsedReply:
    """Parse the calls of a text. Never raises; malformed calls stay in the content.

    Calls within the thoughts at the start of a text (up to `</think>`) are ignored. Without calls, the content is the
    whole text.

    Args:
        salt: makes ids differ between equal texts, for example the number of a turn. The same text and salt give the
            same ids, another text gives others.
    """
    thoughts, end, answer = text.rpartition(_THOUGHTS_END)
    if format != "json" and TOOL_CALL_START in answer:
        around, found = _tagged(answer)
    elif format != "hermes":
        around, found = _in_json(answer)
    else:
        around, found = answer, []
    malformed = [each for each in found if isinstance(each, str)]
    named = [each for each in found if not isinstance(each, str)]
    if not named:
        return ParsedReply(text, malformed=malformed)
    calls = [ToolCall(_id(salt, number, text), *each) for number, each in enumerate(named)]
    return ParsedReply(f"{thoughts}{end}{around.strip()}", tool_calls=calls, malformed=malformed)


def render_tool_calls(calls: Sequence[ToolCall], format: ToolFormat = "auto") -> str:
    """Write calls as text; the inverse of `parse_tool_calls`."""
    texts = [_without_tags(f'{{"name": {_json(call.name)}, "arguments": {_json(call.arguments)}}}') for call in calls]
    if format != "json":
        return "\n".join(f"{TOOL_CALL_START}\n{text}\n{TOOL_CALL_END}" for text in texts)
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def describe_tools(tools: Sequence[Mapping[str, Any]], format: ToolFormat = "auto") -> str:
    """Describe tools in text for the system message, for chat templates without tools.

    Args:
        tools: in OpenAI's format.
    """
    listed = "\n".join(_json(each) for each in tools)
    shape = '{"name": <function-name>, "arguments": <args-json-object>}'
    how = f"return a json object with function name and arguments within {TOOL_CALL_START}{TOOL_CALL_END} XML tags:\n"
    how += f"{TOOL_CALL_START}\n{shape}\n{TOOL_CALL_END}"
    if format == "json":
        how = f"reply with nothing but a json object with function name and arguments:\n{shape}"
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\nFor each function call, {how}"
    )


def tool_result_message(call: ToolCall, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Build a tool's result message in OpenAI's format."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def wrap_tool_response(content: str) -> str:
    """Wrap a tool's result for a user's turn, for chat templates without the role `tool`."""
    return f"<tool_response>\n{content}\n</tool_response>"


# -- reading ---------------------------------------------------------------------------------------------------

_Found = tuple[str, dict[str, Any]] | str
"""Name and arguments, or the error of a malformed call."""


def _tagged(text: str) -> tuple[str, list[_Found]]:
    """Parse calls between tags; the last tag may be unclosed, if a stop string cut off the closing tag."""
    before, *rest = text.split(TOOL_CALL_START)
    around, found = [before], list[_Found]()
    for number, part in enumerate(rest):
        inside, closing, after = part.partition(TOOL_CALL_END)
        read = "the tag is not closed" if not closing and number < len(rest) - 1 else _tagged_call(inside)
        found.append(read)
        if isinstance(read, str):
            after = f"{TOOL_CALL_START}{part}"
        around.append(after)
    return "".join(around), found


def _tagged_call(text: str) -> _Found:
    try:
        found = _call(parse_strict_json(text))
    except ValueError as error:
        return f"not JSON: {error}"
    return 'expected {"name": ..., "arguments": {...}}' if found is None else found


def _in_json(text: str) -> tuple[str, list[_Found]]:
    """Parse calls that are the whole text, or in fenced blocks."""
    if text.lstrip().startswith(("{", "[")):
        found = _calls(text)
        return (text, []) if found is None else ("", found)
    around, end, all_found = list[str](), 0, list[_Found]()
    for block in _FENCE.finditer(text):
        found = _calls(block[1])
        if found is not None:
            all_found += found
            if not any(isinstance(each, str) for each in found):
                around.append(text[end : block.start()])
                end = block.end()
    return "".join([*around, text[end:]]), all_found


def _calls(text: str) -> list[_Found] | None:
    """The calls of a JSON text; None if it is something else."""
    try:
        value = parse_strict_json(text)
    except ValueError as error:
        return [f"not JSON: {error}"] if _ATTEMPT.match(text.strip()) else None
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    found = [_call(each) for each in (value if isinstance(value, list) else [value])]
    if all(each is None for each in found):
        return None
    return ["one of the list is no call" if each is None else each for each in found]


def _call(value: Any) -> _Found | None:
    """A call, its error, or None if the value does not look like one."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        return None
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
    key = next((key for key in _ARGUMENTS if key in value), None)
    if name is None or key is None:
        return None
    arguments = value[key]
    if isinstance(arguments, str):
        try:
            arguments = parse_strict_json(arguments)
        except ValueError:
            return f"`{key}` of `{name}` is not JSON"
    if not isinstance(arguments, dict):
        return f"`{key}` of `{name}` is not an object"
    try:
        _json([name, arguments]).encode()
    except UnicodeEncodeError:
        return "it holds half a surrogate pair"
    return name, arguments


def _id(salt: str, number: int, text: str) -> str:
    """Id of a call, from the exact text: turns that differ only in white space get different ids."""
    return hashlib.blake2b(_json([salt, number, text]).encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without_tags(text: str) -> str:
    """Escape `<` in JSON strings wherever a tag would appear."""
    for tag in (TOOL_CALL_START, TOOL_CALL_END, _THOUGHTS_END):
        text = text.replace(tag, f"\\u003c{tag[1:]}")
    return text
