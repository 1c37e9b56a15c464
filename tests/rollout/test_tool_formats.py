"""Tool calls in text: what is written is read back, and nothing a policy writes raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.data.renderer.call_formats import (
    TOOL_CALL_END,
    TOOL_CALL_START,
    describe_tools,
    parse_tool_calls,
    render_tool_calls,
)
from rollmill.types import ParsedReply, ToolCall

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [TOOL_CALL_START, TOOL_CALL_END, "</think>", "```", "```json\n", '"', "\\", "{", "name"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.builds(ToolCall, st.just("x"), TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3
)
PIECES = [
    TOOL_CALL_START, TOOL_CALL_END,
    "{", "}", "[", "]", '"name"', ":", '"arguments"', '"a"', ",", "```", "\n", "json", "</think>",
    '{"name": "a", "arguments": {}}', '{"tool": "a", "args": "{}"}', "[" * 100, "\\ud800", "NaN", "1e999", "x",
]  # fmt: skip


def made(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


@given(CALLS, st.sampled_from(["auto", "hermes", "json"]))
def test_calls_that_are_written_are_read_back(calls: list[ToolCall], format: Any) -> None:
    reply = parse_tool_calls(ParsedReply(render_tool_calls(calls, format)), format)
    found = reply.tool_calls
    assert made(found) == made(calls)
    assert reply.content == ""
    assert len({call.id for call in found}) == len(found)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join))
def test_no_text_raises_and_all_of_it_can_be_passed_on(text: str) -> None:
    for format in ("auto", "hermes", "json"):
        reading = parse_tool_calls(text, format)  # type: ignore[arg-type]
        json.dumps(reading.message)
        for call in reading.tool_calls:
            json.dumps(call.arguments, ensure_ascii=False).encode()
        if not reading.tool_calls and reading.reasoning is None:
            assert reading.content == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ('I ask.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "I ask.", [("f", {})]),
        ('<tool_call>{"name":"f","arguments":{}}', "", [("f", {})]),  # ended by the stop string
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 2}"}</tool_call>', "", [("f", {"a": 2})]),
        ("<think><tool_call>{}</tool_call></think>no call", "no call", []),
        ("<think><tool_call>{}</tool_call> not yet", "", []),
        ('{"tool": "f", "arguments": {"a": "b"}}', "", [("f", {"a": "b"})]),
        ('{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
        ('Now:\n```json\n{"name": "f", "arguments": {}}\n```\n', "Now:", [("f", {})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {}}}', "", [("f", {})]),
        ('{"name": "Ann", "age": 3}', None, []),  # JSON, and no call
        ("[1, 2]", None, []),
        ("The answer is 4.", None, []),
    ],
)
def test_what_is_a_call(text: str, content: str | None, calls: list[Any]) -> None:
    reading = parse_tool_calls(text)
    assert made(reading.tool_calls) == calls
    assert reading.content == (text if content is None else content)
    assert reading.malformed == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>f(1)</tool_call>", "not JSON"),
        ('<tool_call>{"name": "f"}</tool_call>', "expected"),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', "`arguments` of `f` is not an object"),
        ('{"name": "f", "arguments": {', "not JSON"),
        ('{"tool": "f", "args": "x"}', "`args` of `f` is not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 9999}</tool_call>', "too deep"),
    ],
)
def test_what_is_none_is_said_and_stays_in_the_content(text: str, why: str) -> None:
    reading = parse_tool_calls(text)
    assert reading.tool_calls == []
    [said] = reading.malformed
    assert why in said
    assert reading.content == text


def test_calls_beside_malformed_ones_are_calls() -> None:
    reading = parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>oh</tool_call>')
    assert made(reading.tool_calls) == [("f", {})]
    assert reading.content == "<tool_call>oh</tool_call>"
    assert len(reading.malformed) == 1


def test_ids_depend_on_text_and_salt() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    ids = [call.id for salt in ("1", "2") for call in parse_tool_calls(text, salt=salt).tool_calls]
    assert len(set(ids)) == 4
    assert ids[:2] == [call.id for call in parse_tool_calls(text, salt="1").tool_calls]


def test_tools_are_described_in_the_format_that_is_asked_for() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert TOOL_CALL_START in describe_tools(tools)
    assert TOOL_CALL_START not in describe_tools(tools, "json")
    assert '"name": "f"' in describe_tools(tools, "json")
