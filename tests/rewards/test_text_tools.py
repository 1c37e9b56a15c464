"""Citations and tool calls, and how a policy would try to earn them without being right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reward_helpers import completion, judged, task
from support.rule_helpers import ADAPTER, judge_of, reward, verdict

from rollmill.errors import RewardError
from rollmill.rewards.resources import RewardResources

FACTS = {"facts": ["The tower is 324 m tall.", "It was built from 1887 to 1889, in Paris.", "It is made of iron."]}
NEEDED = FACTS | {"citations": [1, 2]}


@pytest.mark.parametrize(
    ("text", "precision", "f1", "outcome"),
    [
        ("It is 324 m tall [1].", 1.0, 2 / 3, "ok"),
        ("It is tall [1] and old [2].", 1.0, 1.0, "ok"),
        ("It is tall [1, 2].", 1.0, 1.0, "ok"),
        ("It is tall [1][1][1] [1].", 1.0, 2 / 3, "ok"),  # saying it again brings nothing
        ("All of it [1][2][3].", 1.0, 4 / 5, "ok"),
        ("It is tall [doc:1] and old [src:2].", 1.0, 1.0, "ok"),
        ("It is tall [1] and new [7].", 1 / 2, 1 / 2, "invented"),
        ("Tall [1], old [2], " + " ".join(f"[{n}]" for n in range(4, 100)), 2 / 98, 4 / 100, "invented"),
        ('"The tower is 324 m tall" [1], "built from 1887" [2]', 1.0, 1.0, "ok"),
        ("“the TOWER is 324 m tall.” [1], [2]", 1.0, 1.0, "ok"),
        ('"The tower is 999 m tall" [1], [2]', 2 / 3, 4 / 5, "misquoted"),
        ('"The tower is 324 m tall" [2], [1]', 2 / 3, 4 / 5, "misquoted"),
        ('"made of iron" [1, 3]', 1.0, 1 / 2, "ok"),
        ('"ower is 324" [1] [2]', 2 / 3, 4 / 5, "misquoted"),  # parts of words are no quotation
        ("It is tall.", 0.0, 0.0, "no_citation"),
        ("It is tall [sic] [see above] [1](http://example.org) []", 0.0, 0.0, "no_citation"),
        ("[1]" * 2000, 0.0, 0.0, "too_many"),
    ],
)
def test_citations(text: str, precision: float, f1: float, outcome: str) -> None:
    assert verdict("citation", None, text, FACTS) == (pytest.approx(precision), outcome)
    assert verdict("citation", None, text, NEEDED) == (pytest.approx(f1), outcome)


def test_quotations_may_be_required_or_ignored() -> None:
    text = '"The tower is 324 m tall" [1], and iron [3]; "iron" [3], "built from 1999 to" [2]'
    assert reward("citation", None, text, FACTS, quotes="require") == pytest.approx(1 / 4)
    assert reward("citation", None, text, FACTS, quotes="ignore") == 1
    assert reward("citation", None, text, FACTS, quotes="check", quote_words=1) == pytest.approx(3 / 4)
    assert verdict("citation", None, "see [1][2][3]", FACTS, quotes="require") == (0.0, "ok")


def test_facts_have_ids_of_their_own() -> None:
    named = {"facts": [{"id": "doc:a", "text": "x"}, {"id": "b", "text": "y"}]}
    assert reward("citation", None, "[doc:a] [b]", named) == 1
    assert reward("citation", None, "[doc:c] [b] [c]", named) == 0.5
    assert reward("citation", None, "[web:b]", {"facts": {"b": "y"}}) == 1
    assert reward("citation", None, "nothing", FACTS | {"citations": []}) == 1
    assert reward("citation", None, "[1]", FACTS | {"citations": []}) == 0
    assert reward("citation", None, "[1]") is None
    assert verdict("citation", None, "[1]", FACTS, tag="answer") == (0.0, "no_answer")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"facts": "text"}, "`facts` must be a list of texts"),
        ({"facts": [1]}, "`facts` must be a list of texts"),
        (FACTS | {"citations": [4]}, r"`citations` names \['4'\], which its column `facts` lacks"),
        (FACTS | {"citations": "1"}, "`citations` is '1'; expected a list of ids"),
        ({"facts": [{"id": 1, "text": "a"}, {"id": "1", "text": "b"}]}, "`facts` has an id twice"),
    ],
)
def test_wrong_facts_are_errors(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        verdict("citation", None, "[1]", metadata)


@given(st.text(alphabet='[]"1234,: adoc“”', max_size=100))
def test_citations_of_any_text(text: str) -> None:
    value = reward("citation", None, text, NEEDED)
    assert 0 <= value <= 1
    assert reward("citation", None, text + " [99]", NEEDED) <= value


# -- tool calls ------------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOLS = {"tools": [WEATHER, {"name": "now"}]}
ROME = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}


def tagged(*calls: Any) -> str:
    return "".join(
        f"\n<tool_call>\n{each if isinstance(each, str) else json.dumps(each)}\n</tool_call>" for each in calls
    )


def test_valid_calls() -> None:
    now, bad = {"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"days": 0}}
    deep = '{"name": "now", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}"
    with judge_of("tool_call", time_limit_s=5) as judge:
        for text, value, outcome in [
            (tagged(ROME), 1.0, "ok"),
            ("I look." + tagged(ROME, now), 1.0, "ok"),
            (tagged({"name": "now"}), 1.0, "ok"),
            (tagged({"name": "weather", "arguments": '{"city": "Rome"}'}), 1.0, "ok"),
            (tagged({"function": ROME, "id": "1"}), 1.0, "ok"),
            (tagged(ROME, bad), 0.5, "bad_arguments"),
            (tagged({"name": "now", "arguments": {"x": 1}}), 0.0, "bad_arguments"),
            (tagged({"name": "weather", "arguments": {"city": "Rome", "days": 2.5}}), 0.0, "bad_arguments"),
            (tagged(ROME, {"name": "launch", "arguments": {}}), 0.5, "unknown_tool"),
            (tagged("{'name': 'now'}"), 0.0, "malformed"),
            (tagged('{"name": "now"} and more'), 0.0, "malformed"),
            (tagged('{"name": "now", "arguments": [1]}'), 0.0, "malformed"),
            (tagged('{"name": ["now"]}'), 0.0, "malformed"),
            (tagged('{"name": "now", "arguments": {"x": NaN}}'), 0.0, "malformed"),
            (tagged(deep), 0.0, "malformed"),
            (tagged(ROME) + "<tool_call>" + json.dumps(now), 0.5, "malformed"),
            (tagged(ROME) + "</tool_call>", 0.5, "malformed"),
            ("<tool_call>" + tagged(ROME), 0.5, "malformed"),
            (json.dumps(ROME), 0.0, "no_call"),
            ("", 0.0, "no_call"),
            (tagged(*[ROME] * 17), 0.0, "too_many"),
            ("<tool_call>" * 9_000, 0.0, "too_many"),
        ]:
            found = judged(judge, None, text, **TOOLS)
            assert (found.reward, found.outcomes["tool_call"]) == (value, outcome), text[:80]
        assert judged(judge, None, tagged(ROME)).reward is None


def test_calls_as_json() -> None:
    openai = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]}
    with judge_of("tool_call", syntax="json", time_limit_s=5) as judge:
        for text, value, outcome in [
            (json.dumps(ROME), 1.0, "ok"),
            (json.dumps([ROME, {"name": "now"}]), 1.0, "ok"),
            (json.dumps(openai), 1.0, "ok"),
            (f"```json\n{json.dumps(ROME)}\n```", 1.0, "ok"),
            (json.dumps({"tool_calls": None}), 0.0, "no_call"),
            ("[]", 0.0, "no_call"),
            ("42", 0.0, "no_call"),
            ('{"answer": 42}', 0.0, "malformed"),
            (json.dumps(ROME) + ".", 0.0, "malformed"),
            ("[" * 50_000, 0.0, "malformed"),
        ]:
            found = judged(judge, None, text, **TOOLS)
            assert (found.reward, found.outcomes["tool_call"]) == (value, outcome), text[:80]


def test_wanted_calls() -> None:
    now = {"name": "now", "arguments": {}}
    same = {"name": "weather", "arguments": {"days": 2.0, "city": "Rome"}}
    other = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
    with judge_of("tool_call", time_limit_s=5) as judge:
        for wanted, text, value, outcome in [
            ([ROME], tagged(ROME), 1.0, "ok"),
            ([ROME], tagged(same), 1.0, "ok"),
            ([ROME, now], tagged(now, ROME), 1.0, "ok"),
            ([ROME], tagged(other), 0.0, "wrong_call"),
            ([ROME], tagged(ROME, other), 2 / 3, "wrong_call"),  # trying around costs
            ([ROME], tagged(ROME, ROME), 2 / 3, "wrong_call"),
            ([ROME, ROME], tagged(ROME, ROME), 1.0, "ok"),
            ([ROME, now], tagged(ROME), 2 / 3, "wrong_call"),
            ([ROME], tagged(ROME, "nonsense"), 2 / 3, "malformed"),
            ([], "No tool helps.", 1.0, "ok"),
            ([], tagged(now), 0.0, "wrong_call"),
        ]:
            found = judged(judge, None, text, **TOOLS, tool_calls=wanted)
            assert (found.reward, found.outcomes["tool_call"]) == (pytest.approx(value), outcome), text
        with pytest.raises(RewardError, match=r"`tool_calls` is .*; expected a list of"):
            judged(judge, None, "", **TOOLS, tool_calls=["now"])
        with pytest.raises(RewardError, match=r"`tool_calls` names \['launch'\], which its column `tools` lacks"):
            judged(judge, None, "", **TOOLS, tool_calls=[{"name": "launch"}])
        with pytest.raises(RewardError, match="has a call that its column `tools` rejects; correct one"):
            judged(judge, None, tagged(now), **TOOLS, tool_calls=[{"name": "weather", "arguments": {"days": 0}}])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("now", "`tools` has None; expected a list of"),
        ([{"type": "function"}], "`tools` has {'type': 'function'}"),
        (
            [{"name": "f", "parameters": {"$ref": "http://example.org"}}],
            "the JSON Schema refers to 'http://example.org'",
        ),
        ([{"name": "f", "parameters": {"type": "integr"}}], "not a JSON Schema"),
    ],
)
def test_wrong_tools_are_errors(tools: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        verdict("tool_call", None, tagged({"name": "f"}), {"tools": tools})


@pytest.mark.slow
def test_true_is_not_one() -> None:
    loose = {"tools": [{"name": "f", "parameters": {}}], "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    call = {"name": "f", "arguments": {"x": 1}}
    assert reward("tool_call", None, tagged(call), loose) == 1
    assert verdict("tool_call", None, tagged(call | {"arguments": {"x": True}}), loose) == (0, "wrong_call")


@pytest.mark.slow
def test_the_time_of_a_schema_check_is_the_grader_s() -> None:
    """The first one waits for the process to start; what is reported as work is not more than all of it."""
    for keys, text in (({"name": "tool_call"}, tagged({"name": "now"})), ({"name": "format", "json_schema": {}}, "{}")):
        rule = ADAPTER.validate_python(keys).prepare(resources := RewardResources())
        found = asyncio.run(rule.score(task(None, **TOOLS), completion(text)))  # type: ignore[union-attr]
        resources.close()
        assert found.outcome == "ok"
        assert found.run_s is not None
        assert found.run_s > 0
