"""Forced tool calls: how a model writes a call, learned from what its chat template writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from rollmill.data.renderer import Renderer
from rollmill.data.renderer.call_formats import TOOL_CALL_END, TOOL_CALL_START
from rollmill.data.renderer.template import (
    CALL_ID,
    MARK,
    OTHER_MARK,
    QUESTION,
    call_message,
    common_prefix,
    probe_tool,
)
from rollmill.errors import ChatTemplateError
from rollmill.types import ToolCall

_ARGUMENTS = {OTHER_MARK: 1}


@dataclass(frozen=True, slots=True)
class CallPattern:
    """The text of a call, around its name and its arguments, which are JSON.

    Attributes:
        gap: text between two calls; None: one call a turn.
        quoted: the name is a text of JSON.
    """

    begin: str
    between: str
    end: str
    gap: str | None
    quoted: bool = True


HERMES_PATTERN = CallPattern(f'{TOOL_CALL_START}\n{{"name": "', '", "arguments": ', f"}}\n{TOOL_CALL_END}", "\n")


@lru_cache(maxsize=32)
def call_pattern(renderer: Renderer) -> CallPattern | None:
    """Return how the model writes a call, for a grammar; None if its arguments are not JSON, or it is not known."""
    if not renderer.replies.native_calls:
        return HERMES_PATTERN
    format = renderer.replies.call_format
    if format is None or format.python:
        return None
    try:
        before = renderer.template.render([QUESTION], [probe_tool()])
        one, two = (_written(renderer, count) for count in (1, 2))
    except ChatTemplateError:
        return None
    open_at = one.rfind("{", 0, one.rfind(OTHER_MARK))
    close_at = one.find("}", open_at) + 1
    name_at = one.rfind(MARK, 0, open_at)
    mark = format.section.strip() or format.start.strip()
    begin_at = one.rfind(mark, 0, name_at) if mark else common_prefix(before, one)
    if min(open_at, close_at - 1, name_at, begin_at) < 0:
        return None
    if before == one[: len(before)] and not one[len(before) : begin_at].strip():
        begin_at = len(before)
    after = one[close_at:]
    close = format.section_end.strip() or format.end.strip()
    ends = after.find(close) + len(close) if close else after.find(renderer.template.call_end)
    end = after[:ends] if ends >= 0 else after.rstrip()
    found = CallPattern(
        one[begin_at:name_at], one[name_at + len(MARK) : open_at], end, None, one[name_at - 1 : name_at] == '"'
    )
    inner = renderer.encode(f"{found.begin}{MARK}{found.between}")
    if renderer.stop_ids.intersection(inner) or not _is_read(renderer, found, before):
        return None  # generation would end within the call, or it is not read back
    return _with_gap(found, two)


def _written(renderer: Renderer, count: int) -> str:
    turn = call_message([ToolCall(CALL_ID, MARK, _ARGUMENTS)] * count)
    try:
        return renderer.template.render([QUESTION, turn], [probe_tool()], prompt=False)
    except ChatTemplateError:
        if count == 1:
            raise
        return ""  # the template takes one call a turn


def _with_gap(pattern: CallPattern, two: str) -> CallPattern:
    """The pattern with what stands between two calls of one turn, if that is white space."""
    begin, end = pattern.begin.lstrip(), pattern.end
    texts = re.escape(end) + r"(\s*)" + re.escape(begin) + re.escape(MARK)
    found = re.search(texts, two) if begin and end.strip("}] \n") else None
    return pattern if found is None else CallPattern(begin, pattern.between, end, found[1], pattern.quoted)


def _is_read(renderer: Renderer, pattern: CallPattern, before: str) -> bool:
    """True if a call of the pattern is read back, behind a prompt whose reasoning is closed."""
    text = f"{pattern.begin}{MARK}{pattern.between}{json.dumps(_ARGUMENTS)}{pattern.end}"
    start, end = renderer.template.reasoning_tags
    text = f"{end}{text}" if before.rstrip().endswith(start.strip()) else text
    reply = renderer.parse(renderer.encode(text), renderer.encode(before), [probe_tool()])
    found = [(call.name, call.arguments) for call in reply.tool_calls]
    return found == [(MARK, _ARGUMENTS)] and not reply.malformed


def call_rule(renderer: Renderer, text: str) -> str:
    """A piece of a call as a rule of a grammar: its tokens that are no plain text, any id, and the rest as it is."""
    tokens = sorted((each for each in renderer.template.special_tokens if each in text), key=len, reverse=True)
    split = re.split(f"({'|'.join(map(re.escape, [*tokens, CALL_ID]))})", text)
    found = []
    for piece in filter(None, split):
        if piece == CALL_ID:
            found.append("/[a-zA-Z0-9]{9}/")
        elif piece in tokens:
            found.append(f"<[{renderer.tokenizer.convert_tokens_to_ids(piece)}]>")
        else:
            found.append(json.dumps(piece, ensure_ascii=False))
    return " ".join(found) or '""'
