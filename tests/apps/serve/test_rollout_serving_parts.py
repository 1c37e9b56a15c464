"""Parts of the endpoint that hold for any input: what is shown while it comes, and messages in one form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_tokenizer

from rollmill.apps.serve.endpoint.anthropic_protocol import MessagesRequest
from rollmill.apps.serve.endpoint.messages import assistant_message, normalize_messages
from rollmill.apps.serve.endpoint.protocol import ChatMessageParam
from rollmill.apps.serve.endpoint.reply_stream import TextStream
from rollmill.apps.serve.endpoint.responses_protocol import ResponseRequest
from rollmill.data.renderer import Renderer
from rollmill.data.renderer.call_formats import parse_tool_calls, render_tool_calls
from rollmill.files import parse_strict_json
from rollmill.types import ToolCall

TOKENIZER = toy_tokenizer()
PIECES = st.sampled_from(["one", " two", "ST", "STOP", "é", "<tool", "_call>", "```", "\n", "{", "世界", " "])


@given(st.lists(PIECES, max_size=12))
def test_pieces_are_the_beginning_of_the_whole_and_never_a_stop_string(pieces: list[str]) -> None:
    text = "".join(pieces)
    stream, shown = TextStream(TOKENIZER, ["STOP"]), ""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        shown += stream.push(token).content
        assert text.split("STOP")[0].startswith(shown)
        assert shown == stream.shown
    whole = text.split("STOP")[0]
    assert shown + stream.finish(whole).content == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab<{}\"'\\", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(st.text("abc_", min_size=1, max_size=5), st.dictionaries(st.text("xyz", max_size=2), JSON)))


@settings(max_examples=40)
@given(st.text("ab \n", max_size=6), CALLS, st.randoms(use_true_random=False))
def test_what_was_answered_is_known_again(content: str, calls: list[tuple[str, dict[str, Any]]], random: Any) -> None:
    """Whatever a client does to ids, spaces and the order of arguments."""
    own = assistant_message(content, [ToolCall(f"id{i}", name, arguments) for i, (name, arguments) in enumerate(calls)])
    theirs: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": content}], "refusal": None}
    if calls:
        theirs["tool_calls"] = [
            {
                "id": f"other{i}",
                "function": {"name": name, "arguments": json.dumps(_shuffled(arguments, random), indent=1)},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
    sent = ChatMessageParam.model_validate(theirs)
    assert normalize_messages([sent]) == normalize_messages([own])


def _shuffled(value: Any, random: Any) -> Any:
    if isinstance(value, list):
        return [_shuffled(each, random) for each in value]
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    random.shuffle(items)
    return {key: _shuffled(each, random) for key, each in items}


def test_results_follow_their_calls_through_other_ids() -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"role": "assistant", "tool_calls": [call, call | {"id": "y"}]},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
    ]
    found = normalize_messages([ChatMessageParam.model_validate(each) for each in messages])
    assert [each["role"] for each in found] == ["system", "assistant", "tool"]
    assert [each["id"] for each in found[1]["tool_calls"]] == ["call00000", "call00001"]
    assert found[2]["tool_call_id"] == "call00001"


@pytest.mark.parametrize("system", [True, False])
def test_tools_are_described_where_the_template_knows_of_none(system: bool) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    start = [{"role": "system", "content": "be kind"}] if system else []
    messages, left = Renderer(TOKENIZER).fitted([*start, {"role": "user", "content": "hi"}], [tool], "auto")
    assert left is None
    assert [each["role"] for each in messages] == ["system", "user"]
    assert json.dumps(tool) in messages[0]["content"]
    assert messages[0]["content"].startswith("be kind") == system


def test_calls_survive_being_written() -> None:
    calls = parse_tool_calls('<tool_call>\n{"name": "f", "arguments": {"a": "<x>"}}\n</tool_call>').tool_calls
    assert parse_strict_json(render_tool_calls(calls).split("\n")[1])["arguments"] == {"a": "<x>"}


def test_reasoning_is_kept_by_either_name_and_only_as_a_text() -> None:
    turns: list[Any] = [
        {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "assistant", "content": "a", "reasoning": "why"},
        {"role": "assistant", "content": None, "reasoning_content": "why"},
        {"role": "assistant", "content": "a", "reasoning": {"effort": "low"}},
        {"role": "user", "content": "a", "reasoning_content": "why"},
    ]
    found = normalize_messages([ChatMessageParam.model_validate(each) for each in turns])
    assert [each.get("reasoning_content") for each in found] == ["why", "why", "why", None, None]
    assert [each["content"] for each in found] == ["a", "a", "", "a", "a"]


def test_blocks_of_thinking_and_items_of_reasoning_belong_to_the_turn_they_precede() -> None:
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"},
    ]
    hi = {"role": "user", "content": "hi"}
    asked = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": [hi, {"role": "assistant", "content": blocks}, hi]}
    )
    turn = asked.chat_request().messages[1]
    assert (turn.content, turn.known_reasoning) == ("a", "why")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"role": "assistant", "content": "a"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "b"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "then"}]},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "2", "output": "b"},
    ]
    found = ResponseRequest.model_validate({"input": [hi, *items]}).chat_request(()).messages
    assert [each.role for each in found] == ["user", "assistant", "tool", "assistant", "tool"]
    said = [(each.content, each.known_reasoning, len(each.tool_calls or [])) for each in found if each.tool_calls]
    assert said == [("a", "why", 1), ("", "then", 1)]
