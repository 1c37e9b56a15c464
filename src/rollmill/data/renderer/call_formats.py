"""Formats of tool calls in a turn's text: the two that work with any model, and those learned from a chat template.

`hermes` (https://github.com/NousResearch/Hermes-Function-Calling), also of Qwen 2.5 and Qwen 3:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "17*23"}}
    </tool_call>

`json`: a call `{"name": ..., "arguments": {...}}`, or a list of calls, as the whole text or in fenced blocks. `tool`
may replace `name`, and `parameters` (as in Llama 3.1) or `args` may replace `arguments`.

Where a call ends is found by reading its JSON, never by searching for the closing tag, which a string may contain.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollmill.errors import ChatTemplateError
from rollmill.files import parse_strict_json
from rollmill.types import ParsedReply, ToolCall, split_reasoning

ToolFormat = Literal["auto", "hermes", "json"]
"""Format of calls; `auto` is the model's own, else hermes if its tags appear, else json."""

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_IDS = ("id", "tool_call_id")
_NAMES, _ARGUMENTS = ("name", "tool_name", "tool", "function"), ("arguments", "args", "parameters")
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n(.*?)```", re.DOTALL)
ATTEMPT = re.compile(rf'\[?\s*{{\s*"(?:{"|".join(_NAMES)})"\s*:')
"""The beginning of a JSON text that is meant as a call."""
_ID_LENGTH = 9  # Mistral's templates require ids of nine letters and digits
_UNCLOSED = "it is not closed"

Call = ToolCall | str
"""A call, with its own id or none, or the error of a malformed one."""
Parser = Callable[[str, bool], tuple[str, list[Call]]]
"""Finds the calls of an answer's text; returns the text around well-formed ones, and the calls.

The second argument tells that a stop string ended the text, which may have cut off a closing tag."""


def parse_calls(text: str, parser: Parser, *, salt: str = "", stopped: bool = False) -> ParsedReply:
    """Parse the calls of an answer, without its reasoning. Never raises; malformed calls stay in the content.

    Args:
        salt: makes ids differ between equal texts, for example the number of a turn. The same text and salt give the
            same ids, another text gives others.
    """
    around, found = parser(text, stopped)
    malformed = [each for each in found if isinstance(each, str)]
    named = [each for each in found if not isinstance(each, str)]
    if not named:
        return ParsedReply(text, malformed=malformed)
    calls = [replace(each, id=each.id or call_id(salt, number, text)) for number, each in enumerate(named)]
    return ParsedReply(around.strip(), tool_calls=calls, malformed=malformed)


def parse_tool_calls(turn: ParsedReply | str, format: ToolFormat = "auto", *, salt: str = "") -> ParsedReply:
    """Parse the calls of a turn of plain text, in one of the formats for any model. There are none in reasoning."""
    turn = split_reasoning(turn) if isinstance(turn, str) else turn
    if not turn.reasoning_finished:
        return turn
    return replace(parse_calls(turn.content, text_parser(format), salt=salt, stopped=True), reasoning=turn.reasoning)


def text_parser(format: ToolFormat) -> Parser:
    """Return the parser of a format for any model."""

    def parse(text: str, stopped: bool) -> tuple[str, list[Call]]:
        if format != "json" and TOOL_CALL_START in text:
            return HERMES.parse(text, stopped)
        return _in_json(text) if format != "hermes" else (text, [])

    return parse


def call_id(salt: str, number: int, text: str) -> str:
    """Make the id of a call from the exact text: turns that differ only in white space get different ids."""
    return hashlib.blake2b(_json([salt, number, text]).encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


# -- formats with marks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Calls between marks.

    Attributes:
        section: text before the first call of a turn, if it is not also before each further call.
        start: text before each call, or before a list of them.
        between: text between the name and the arguments, None where a JSON object or list holds both. `CALL_ID` stands
            for an id.
        end: text after each call, or after a list of them.
        python: calls are Python's: `name(text="a", number=1)`.
    """

    section: str
    start: str
    between: str | None
    end: str
    section_end: str = ""
    python: bool = False

    def parse(self, text: str, stopped: bool) -> tuple[str, list[Call]]:
        mark = self.start.strip() or self.section.strip()
        around, found, at = list[str](), list[Call](), 0
        while (begin := self._next(text, mark, at)) is not None:
            inside = begin + len(mark)
            calls, after = self._read(text, inside, stopped)
            if any(isinstance(each, str) for each in calls):
                following = self._next(text, mark, inside)
                after = len(text) if following is None else following
                around.append(text[at:after])  # malformed calls stay in the content
            else:
                around.append(text[at:begin])
            found += calls
            at = after
        around.append(text[at:])
        rest = "".join(around)
        if found and not any(isinstance(each, str) for each in found):
            for each in (self.section.strip(), self.section_end.strip()):
                rest = rest.replace(each, "", 1) if each else rest
        return rest, found

    def _next(self, text: str, mark: str, at: int) -> int | None:
        if not mark:  # the whole text is the calls
            return at if at == 0 and text.lstrip()[:1] in ("{", "[") and text.strip() else None
        found = text.find(mark, at)
        return None if found < 0 else found

    def _read(self, text: str, at: int, stopped: bool) -> tuple[list[Call], int]:
        """Read what follows a mark: its calls, and the index after their closing mark."""
        try:
            if self.python:
                found, at = _read_python(text, at)
            elif self.between is None:
                value, at = _read_json(text, at)
                found = _calls_of(value) or ['expected {"name": ..., "arguments": {...}}']
                while not self.end and text[at:].lstrip().startswith("{"):  # several behind one mark (Llama 4)
                    value, at = _read_json(text, at)
                    found += _calls_of(value) or ["it is no call"]
            else:
                found, at = self._read_split(text, at)
        except ValueError as error:
            return [str(error)], at
        end = self.end.strip()
        rest = text[at:].lstrip()
        if end and rest.startswith(end):
            return found, len(text) - len(rest) + len(end)
        if end and not (stopped and not rest):
            return [_UNCLOSED], at
        return found, at

    def _read_split(self, text: str, at: int) -> tuple[list[Call], int]:
        assert self.between is not None
        before, given, after = self.between.partition(ID_PLACE)
        pattern = rf"\s*([\w.:/-]+?){_loose(before)}" + (rf"([\w.:-]+?){_loose(after)}" if given else "()")
        header = re.compile(pattern).match(text, at)
        if header is None:
            raise ValueError(f"expected a name, {self.between.strip()!r} and a JSON object")
        arguments, at = _read_json(text, header.end())
        return [checked_call(header[1], arguments, "arguments", header[2])], at


ID_PLACE = "\x00"
"""Stands for an id in `MarkedCalls.between`."""
HERMES = MarkedCalls("", TOOL_CALL_START, None, TOOL_CALL_END)


def _loose(text: str) -> str:
    """A pattern for a text whose white space may differ."""
    return r"\s*".join(["", *(re.escape(each) for each in text.split()), ""])


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value at an index, which white space may precede. Raises ValueError if there is none."""
    at += len(text[at:]) - len(text[at:].lstrip())
    end = _json_end(text, at)
    try:
        return parse_strict_json(text[at:end]), end
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _json_end(text: str, at: int) -> int:
    """Index after the bracket that closes the one at `at`, outside of strings; the end of the text if none does."""
    depth, quoted, i = 0, False, at
    if text[at : at + 1] not in ("{", "["):
        return len(text)
    while i < len(text):
        character = text[i]
        if quoted:
            i += character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return i + 1
        i += 1
    return len(text)


def _read_python(text: str, at: int) -> tuple[list[Call], int]:
    """Read `[name(text="a"), ...]` or `name(text="a")` as Python. Raises ValueError if it is something else."""
    at += len(text[at:]) - len(text[at:].lstrip())
    end = _python_end(text, at)
    try:
        tree = ast.parse(text[at:end], mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(each) for each in calls], end
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not calls of Python: {error}") from None


def _python_end(text: str, at: int) -> int:
    """Index after the bracket that closes the first one, outside of strings; the end of the text if none does."""
    depth, quote, i = 0, "", at
    while i < len(text):
        character = text[i]
        if quote:
            i += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return len(text)


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("expected name(argument=value, ...)")
    arguments = {str(each.arg): _python_value(each.value) for each in node.keywords}
    return checked_call(ast.unparse(node.func), arguments, "arguments")


def _python_value(node: ast.expr) -> Any:
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:  # some templates write JSON's words
        return words[node.id]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key
        }
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(each) for each in node.elts]
    return ast.literal_eval(node)


# -- JSON ------------------------------------------------------------------------------------------------------


def _in_json(text: str) -> tuple[str, list[Call]]:
    """Parse calls that are the whole text, or in fenced blocks."""
    if text.lstrip().startswith(("{", "[")):
        found = _calls_in(text)
        return (text, []) if found is None else ("", found)
    around, end, all_found = list[str](), 0, list[Call]()
    for block in _FENCE.finditer(text):
        found = _calls_in(block[1])
        if found is not None:
            all_found += found
            if not any(isinstance(each, str) for each in found):
                around.append(text[end : block.start()])
                end = block.end()
    return "".join([*around, text[end:]]), all_found


def _calls_in(text: str) -> list[Call] | None:
    """The calls of a JSON text; None if it is something else."""
    try:
        value = parse_strict_json(text)
    except ValueError as error:
        return [f"not JSON: {error}"] if ATTEMPT.match(text.strip()) else None
    return _calls_of(value)


def _calls_of(value: Any) -> list[Call] | None:
    """The calls of a JSON value; None if it holds none."""
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    found = [_call(each) for each in (value if isinstance(value, list) else [value])]
    if all(each is None for each in found):
        return None
    return ["one of the list is no call" if each is None else each for each in found]


def _call(value: Any) -> Call | None:
    """A call, its error, or None if the value does not look like one."""
    outer = value
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        return None
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
    key = next((key for key in _ARGUMENTS if key in value), None)
    id = next((given[each] for given in (value, outer) for each in _IDS if isinstance(given.get(each), str)), "")
    return None if name is None or key is None else checked_call(name, value[key], key, id)


def checked_call(name: str, arguments: Any, key: str = "arguments", id: str = "") -> Call:
    """A call whose arguments are an object, or its error."""
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
    return ToolCall(id, name, arguments)


# -- writing, for templates that show no tools -----------------------------------------------------------------


def render_tool_calls(calls: Sequence[ToolCall], format: ToolFormat = "auto") -> str:
    """Write calls as text; the inverse of `parse_tool_calls`."""
    texts = [f'{{"name": {_json(call.name)}, "arguments": {_json(call.arguments)}}}' for call in calls]
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- learning --------------------------------------------------------------------------------------------------


def learn_calls(
    one: str, two: str | None, names: tuple[str, str], arguments: Mapping[str, Any], id: str
) -> MarkedCalls:
    """Learn the format of a template's calls from its own text.

    Args:
        one: the turn's text with a call of `names[0]` with `arguments`, from after the prompt up to the turn's end.
        two: the same with a second call, of `names[1]`; None if the template takes one call a turn.
        id: the id that the calls have.

    Raises ChatTemplateError if the format is none that can be learned: marks around JSON or Python calls.
    """
    name = names[0]
    at = one.find(name)
    for i, character in enumerate(one):
        if character not in "{[":
            continue
        try:
            value, end = _read_json(one, i)
        except ValueError:
            continue
        calls = _calls_of(value)
        if _is(calls, name, arguments):
            return MarkedCalls("", one[:i], None, one[end:])
        if value == arguments and 0 <= at < i:
            return _split_format(one, two, names, at, i, end, id)
    if (found := re.search(rf"\[?\s*{re.escape(name)}\(", one)) is not None:
        try:
            calls, end = _read_python(one, found.start())
        except ValueError:
            calls, end = [], 0
        if _is(calls, name, arguments):
            return MarkedCalls("", one[: found.start()], None, one[end:], python=True)
    raise ChatTemplateError("the tokenizer's chat template writes tool calls in a format that cannot be read")


def _is(calls: Sequence[Call] | None, name: str, arguments: Mapping[str, Any]) -> bool:
    """True for one call of this name, with these arguments."""
    return [(each.name, each.arguments) for each in calls or () if isinstance(each, ToolCall)] == [(name, arguments)]


def _split_format(
    one: str, two: str | None, names: tuple[str, str], at: int, json_at: int, end: int, id: str
) -> MarkedCalls:
    """The format of calls whose name stands before a JSON object of arguments."""
    between = one[at + len(names[0]) : json_at].replace(id, ID_PLACE)
    section, start, close, section_end = "", one[:at], one[end:], ""
    second = -1 if two is None else two.find(names[1], end)
    if two is not None and second >= 0:
        gap = two[end:second]  # the end of the first call, and the start of the second
        size = next(size for size in range(min(len(gap), at), -1, -1) if one[:at].endswith(gap[len(gap) - size :]))
        section, start = one[: at - size], one[at - size : at]
        ends = gap[: len(gap) - size]
        close, section_end = (ends, one[end + len(ends) :]) if one[end:].startswith(ends) else (close, "")
    return MarkedCalls(section, start, between, close, section_end)
