"""Whatever a policy writes, every rule and every reward about pictures gives a number, and ends nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reward_helpers import judged
from support.rule_helpers import ADAPTER

from rollmill.errors import ConfigError
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.builtin.language import _identifier
from rollmill.rewards.text.json_schema import build_validator

pytest.importorskip("rapidfuzz")
pytest.importorskip("jsonschema")

RULES: list[dict[str, Any]] = [
    {"name": "format", "tags": ["think", "answer"], "partial": True},
    {"name": "format", "sections": ["Plan", "Answer"], "partial": True},
    {"name": "format", "json_schema": {"type": "object", "properties": {"a": {"multipleOf": 0.5}}}, "time_limit_s": 5},
    {"name": "language", "language": "en"},
    {"name": "language", "language": "ja"},
    {"name": "length", "kind": "overlong", "longest": 100, "buffer": 50},
    {"name": "length", "kind": "target"},
    {"name": "repetition"},
    {"name": "citation"},
    {"name": "citation", "quotes": "require"},
    {"name": "tool_call", "time_limit_s": 5},
    {"name": "tool_call", "syntax": "json", "time_limit_s": 5},
    {"name": "grounding"},
]
ABOUT: dict[str, Any] = {
    "boxes": [[0, 0, 10, 10], {"bbox": [5, 5, 20, 20], "label": "cat"}],
    "points": [[0, 0, 10, 10], {"polygon": [[0, 0], [5, 5], [0, 5]]}],
    "count": 3,
    "ocr": ["some text", "1"],
    "chart": ["Rome", "12"],
    "table": "a,b\nx,1\ny,2",
    "vqa": ["yes"] * 6 + ["no"] * 4,
}
METADATA: dict[str, Any] = {
    "target_length": 20,
    "facts": {"1": "one is here", "doc:2": "two is there"},
    "citations": ["1"],
    "tools": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
    "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
    "image_size": [100, 100],
}


@pytest.fixture(scope="module")
def judges() -> Iterator[tuple[RewardManager, RewardManager]]:
    """Of all rules, and of all rewards that compare with an answer."""
    rules, about = ([ADAPTER.validate_python(each) for each in part] for part in (RULES, [{"name": n} for n in ABOUT]))
    with build_reward_manager(rules) as one, build_reward_manager(about) as other:
        yield one, other


def check(judges: tuple[RewardManager, RewardManager], text: str) -> None:
    """Every part is a number within its bounds, for a task of each kind."""
    for part, value in judged(judges[0], None, text, **METADATA).parts.items():
        lowest = -1 if part.startswith(("length", "repetition")) and part != "length#2" else 0
        assert value is not None, part
        assert lowest <= value <= 1, part
    for name, gold in ABOUT.items():
        parts = judged(judges[1], gold, text, vision={name: None}).parts
        value = parts.pop(name)
        assert value is not None, name
        assert 0 <= value <= 1, name
        assert set(parts.values()) == {None}


MARKS = (
    '[ ] { } ( ) " : , 1 -2.5 1e999 NaN null <box> </box> <point <think> </think> <tool_call> </tool_call> [1] | |---|'
)
MORE = "``` $ \\( \\) Plan: ## a 我 は α \ud800 \x00 % “ ” bbox_2d name arguments label"
PIECES = [*MARKS.split(" "), *MORE.split(" ")]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["bbox_2d", "point", "label", "name", "arguments", "tool_calls", "a"]), inner)
    ),
    max_leaves=12,
)
TEXTS = (
    st.text(max_size=80)
    | st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)
    | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
    | JSON.map(json.dumps)
    | JSON.map(lambda value: f"<tool_call>{json.dumps(value)}</tool_call>")
)


@pytest.mark.slow
@given(TEXTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text(judges: tuple[RewardManager, RewardManager], text: str) -> None:
    check(judges, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"a":' * 20_000,
        "[" * 400 + "]" * 400,
        '{"a": 1' + "0" * 4000 + "}",
        '{"a": 1' + "0" * 5000 + "}",
        "<tool_call>" * 9_000,
        "<think>" * 14_000,
        "<box>1,2,3,4</box>" * 5_000,
        "[[1,2,3,4]]" * 9_000,
        '"a b c d" [1] ' * 7_000,
        "| a | b |\n|---|---|\n" * 5_000,
        "a,b\n" * 25_000,
        "again and " * 10_000,
        "`$" * 50_000,
        "```\n" * 25_000,
        "```a\n" * 40_000,
        "# a" + " " * 90_000 + "\r",
        ("# a" + " " * 190 + "b\n") * 500,
        '<point x="1" alt=\'' * 8_000,
        "1," * 50_000,
        "\ud800" * 1_000,
        "x" * 250_000,
    ],
    ids=lambda text: f"{text[:12]!r}x{len(text)}",
)
def test_hostile_texts(judges: tuple[RewardManager, RewardManager], text: str) -> None:
    check(judges, text)


@pytest.mark.parametrize(
    ("keys", "library", "extra"),
    [
        ({"name": "ocr"}, "rapidfuzz.distance", "vision"),
        ({"name": "language", "method": "identify"}, "py3langid.langid", "language"),
        ({"name": "format", "json_schema": {"title": "new"}}, "jsonschema", "schema"),
        ({"name": "tool_call"}, "jsonschema", "schema"),
    ],
)
def test_a_missing_library_is_an_error_that_names_the_extra(
    keys: dict[str, Any], library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_validator.cache_clear()
    _identifier.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ConfigError, match=rf"{keys['name'] if extra != 'language' else 'identify'}`.*rollmill\[{extra}\]"
    ):
        build_reward_manager([ADAPTER.validate_python(keys)])
