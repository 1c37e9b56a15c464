"""The format reward: tags, sections, JSON Schemas, and what policies try."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.reward_helpers import judged
from support.rule_helpers import ADAPTER, judge_of, reward

from rollmill.errors import ConfigError, RewardError
from rollmill.files import parse_strict_json
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.format import FormatReward, check_sections, check_tags
from rollmill.rewards.text.parsing import find_json_values, last_code_block

TAGS = ["think", "answer"]
GOOD = "<think>\n2 and 2\n</think>\n\n<answer>4</answer>\n"


@pytest.mark.parametrize(
    ("text", "partial"),
    [
        (GOOD, 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a <b>c</b> x < 3 </thinking></think><answer>b</answer>", 1.0),  # other marks are text
        ("<think></think><answer>b</answer>", 3 / 4),  # empty
        ("<think> \n ...!? </think><answer>b</answer>", 3 / 4),  # no word inside
        ("so: " + GOOD, 3 / 4),  # something outside
        (GOOD + "really", 3 / 4),
        ("<think>a</think> and <answer>b</answer>", 3 / 4),
        ("<answer>b</answer><think>a</think>", 2 / 4),  # order
        ("<think>a <answer>b</answer></think>", 2 / 4),  # inside each other
        ("<think>a<answer></think>b</answer>", 2 / 4),
        ("<think>a</think><think>a</think><answer>b</answer>", 1 / 4),  # twice
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1 / 4),
        ("<think>a</think><answer>b", 1 / 4),  # not closed
        ("<Think>a</Think><answer>b</answer>", 1 / 4),
        ("</think>a<think><answer>b</answer>", 1 / 4),
        ("< think>a</ think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, partial: float) -> None:
    assert reward("format", None, text, tags=TAGS) == float(partial == 1)
    assert reward("format", None, text, tags=TAGS, partial=True) == partial


def test_tags_that_the_prompt_opens_and_words_inside() -> None:
    assert reward("format", None, "a b</think><answer>b c</answer>", tags=TAGS, opened=True, words=2) == 1
    assert reward("format", None, "a b</think><answer>b c</answer>", tags=TAGS) == 0
    assert reward("format", None, GOOD, tags=TAGS, opened=True) == 0
    assert reward("format", None, GOOD, tags=TAGS, words=2) == 0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]), max_size=12))
def test_tags_are_right_exactly_if_the_text_is_of_the_one_form(parts: list[str]) -> None:
    import re

    text = "".join(parts)
    inside = r"(?:(?!</?(?:think|answer)>).)*a(?:(?!</?(?:think|answer)>).)*"
    form = rf"\s*<think>{inside}</think>\s*<answer>{inside}</answer>\s*"
    assert all(check_tags(text, TAGS, 1)) == (re.fullmatch(form, text, re.DOTALL) is not None)


@pytest.mark.parametrize(
    ("text", "partial"),
    [
        ("## Plan\nadd\n## Answer\n4", 1.0),
        ("Hello.\n**Plan:**\nadd\n\n# PLAN B\nmore\nanswer:\n4", 1.0),
        ("**Plan**:\nadd\n__Answer__\n4", 1.0),
        ("## Plan ##\nadd\n### Answer\n4", 1.0),
        ("## Plan\r\nadd\r\n## Answer\r\n4\r\n", 1.0),
        ("Plan\nadd\nAnswer\n4", 0.0),  # no marks
        ("Plan: add\nAnswer: 4", 0.0),  # not lines of their own
        ("## Plan\n## Answer\n4", 2 / 3),  # empty
        ("## Answer\n4\n## Plan\nadd", 2 / 3),
        ("## Plan\nadd\n## Plan\nadd\n## Answer\n4", 1 / 3),
        ("## Plan\nadd", 1 / 3),
        ("", 0.0),
    ],
)
def test_sections(text: str, partial: float) -> None:
    assert reward("format", None, text, sections=["Plan", "Answer"]) == float(partial == 1)
    assert reward("format", None, text, sections=["Plan", "Answer"], partial=True) == pytest.approx(partial)


@given(st.text(alphabet="#*_: \nPplanAnswer", max_size=200))
def test_any_text_has_sections_or_not(text: str) -> None:
    assert len(check_sections(text, ["Plan", "Answer"], 1)) == 3


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z]"}},
}


@pytest.mark.slow
def test_json_schemas() -> None:
    with judge_of("format", json_schema=SCHEMA) as judge, judge_of("format", json_schema=SCHEMA, whole=True) as whole:
        for text, outcome, whole_outcome in [
            ('{"city": "Rome", "days": 2}', "ok", "ok"),
            ('Sure:\n```json\n{"city": "Rome"}\n```\nDone.', "ok", "not_json"),
            ('```\n{"city": 3}\n```\n```json\n{"city": "Rome"}\n```', "ok", "not_json"),
            ('```json\n{"city": "Rome"}\n```\n```json\n{"city": "rome"}\n```', "invalid", "not_json"),
            ('```json\r\n{"city": "Rome"}\r\n```\r\n', "ok", "not_json"),
            ('{"city": "rome"}', "invalid", "invalid"),
            ('{"city": "Rome", "days": 2.5}', "invalid", "invalid"),
            ('{"city": "Rome", "days": NaN}', "not_json", "not_json"),
            ('{"city": "Rome", "days": 1e999}', "not_json", "not_json"),
            ('{"city": "Rome"} {"city": "Rome"}', "not_json", "not_json"),
            ('{"city": "Rome"', "not_json", "not_json"),
            ("[" * 90_000, "not_json", "not_json"),
            ('{"city": ' + "[" * 300 + "]" * 300 + "}", "not_json", "not_json"),
            ('{"days": ' + "9" * 10_000 + "}", "not_json", "not_json"),
            ('{"city": "R' + "o" * 90_000 + '"}', "ok", "ok"),
            (" " * 250_000, "too_long", "too_long"),
            ("\ud800", "not_json", "not_json"),
        ]:
            for each, expected in ((judge, outcome), (whole, whole_outcome)):
                found = judged(each, None, text)
                assert (found.outcomes["format"], found.reward) == (expected, float(expected == "ok")), text[:60]


@pytest.mark.slow
def test_patterns_of_schemas_cannot_run_for_hours() -> None:
    schema = {"type": "string", "pattern": "^(a|aa)+$"}
    with judge_of("format", json_schema=schema, time_limit_s=0.3, timeout_reward=-1) as judge:
        found = judged(judge, None, '"' + "a" * 60 + 'b"')
        assert (found.reward, found.outcomes) == (-1.0, {"format": "timeout"})
        assert judged(judge, None, '"aaa"').reward == 1


def test_the_schema_may_stand_in_a_column() -> None:
    with judge_of("format", schema_column="schema") as judge:
        assert judged(judge, None, "3", schema={"type": "integer"}).reward == 1
        assert judged(judge, None, "3.5", schema='{"type": "integer"}').reward == 0
        assert judged(judge, None, "3").reward is None
        with pytest.raises(RewardError, match=r"refers to 'https://example.org/s.json'; write it inside the schema"):
            judged(judge, None, "3", schema={"$ref": "https://example.org/s.json"})
        with pytest.raises(RewardError, match="not a JSON Schema: "):
            judged(judge, None, "3", schema={"type": "intege"})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "http://example.org/other.json"}, "refers to 'http://example.org/other.json'"),
        ({"items": [{"anyOf": [{"$dynamicRef": "file:///etc/passwd"}]}]}, "refers to 'file:///etc/passwd'"),
        ({"$ref": "#/$defs/missing"}, "refers to '#/\\$defs/missing', which it lacks"),
        ({"properties": {"a": {"pattern": "(a"}}}, r"has the pattern '\(a': missing \)"),
        ({"type": "objekt"}, r"not a JSON Schema: \$.type: 'objekt' is not valid"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused_at_once(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward_manager([FormatReward(name="format", json_schema=schema)])


def test_a_schema_that_refers_to_itself_accepts_trees_and_ends() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    with judge_of("format", schema_column="schema", time_limit_s=5) as judge:
        assert judged(judge, None, '{"left": {"left": {}}}', schema=tree).reward == 1
        assert judged(judge, None, '{"left": {"right": {}}}', schema=tree).reward == 0
        assert judged(judge, None, "1" + "0" * 400, schema={"multipleOf": 0.1}).reward == 0
        assert judged(judge, None, "{}", schema={"$ref": "#"}).outcomes == {"format": "invalid"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"give exactly one of pattern, tags, sections, json_schema, schema_column \(found none of them\)"),
        ({"pattern": "a", "tags": ["b"]}, "found pattern and tags"),
        ({"tags": ["b"], "whole": True}, "whole is honoured with pattern, json_schema, schema_column, not with tags"),
        ({"pattern": "a", "partial": True}, "partial is honoured with tags, sections, not with pattern"),
        ({"tags": ["a", "A"]}, "tags names one twice"),
        ({"tags": ["a b"]}, "String should match pattern"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({"name": "format", **keys})


LEAVES = st.none() | st.integers() | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner)))
def test_json_inside_text_is_found(value: Any) -> None:
    import json

    found = find_json_values(f"Here it is: {json.dumps(value)}. Fine.")
    assert found == ([value] if isinstance(value, list | dict) else [])
    assert parse_strict_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\na\n```", "a\n"),
        ("```py\na\n```\nb\n```\nc\n```\n", "c\n"),
        ("```\na\n```\n```json\nb", "a\n"),  # the last one is not closed
        ("```md\na\n```json\nb\n ``` \nc", "a\n```json\nb\n"),  # only a bare line closes
        ("```a```", None),
        ("```\na", None),
    ],
)
def test_the_last_closed_fenced_block(text: str, block: str | None) -> None:
    assert last_code_block(text) == block


def test_json_values_takes_what_it_can() -> None:
    assert find_json_values('[1] and {"a": [2]} and [3') == [[1], {"a": [2]}]
    assert find_json_values("[sic] {x} [4]") == [[4]]
    assert find_json_values("[" * 500 + "]" * 500 + "[7]") == [[7]]
    assert find_json_values("[" * 50_000) == find_json_values("[1," * 30_000) == []
