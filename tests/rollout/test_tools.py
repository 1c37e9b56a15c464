"""Tools: what they compute, what they say when they cannot, and what they may not do."""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import AsyncExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from rollmill.config.tools import ToolSection
from rollmill.data.images import PictureFolder
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rollout.environments.base import picture_parts
from rollmill.rollout.tools.builtin.calculator import CalculatorTool, calculator
from rollmill.rollout.tools.builtin.python import PythonTool
from rollmill.rollout.tools.builtin.search import BM25Index, SearchTool, split_passages
from rollmill.rollout.tools.function_tool import FunctionTool, tool
from rollmill.rollout.tools.pool import ToolPool
from rollmill.rollout.tools.toolbox import Tool, Toolbox, ToolError
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

TASK = Task("t", "What?", metadata={"note": "of the task"})


def used(
    sections: list[ToolSection], *calls: tuple[str, dict[str, Any]]
) -> tuple[list[Any], Toolbox, dict[str, float]]:
    """The results of calls in one rollout, its toolbox, and what the stage has counted."""
    pool = ToolPool(sections)

    async def run() -> tuple[list[Any], Toolbox]:
        rollout: Any = Rollout("g/0", TASK, "g", 0, 0, 0, None, None, None)  # type: ignore[arg-type]
        async with pool.one(rollout) as tools:
            return [await tools.call(*each) for each in calls], tools

    try:
        found, tools = asyncio.run(run())
        return found, tools, pool.counters()
    finally:
        pool.close()


# -- calculator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17*23", "391"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 = 0.333333333333"),
        ("1/3 + 2/3", "1"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**100", str(2**100)),
        ("2^-2", "0.25"),
        ("(-1)**99999999999", "-1"),
        ("0**0", "1"),
        ("1_000 × 3 − 1", "2999"),
        ("sqrt(16/9)", "4/3 = 1.33333333333"),
        ("4**0.5", "2"),
        ("round(2.675, 2)", "2.68"),
        ("max(1, 2.5) + gcd(12, 18) - abs(-3)", "5.5"),
        ("factorial(20)", str(math.factorial(20))),
        ("1e3", "1000"),
        ("-0.05", "-0.05"),
    ],
)
def test_the_calculator_computes_exactly(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("9**9**9", "too large"),
        ("2**12001", "too large"),
        ("factorial(1e3)*factorial(1000)*factorial(1000)", "too large"),
        ("factorial(10**9)", "0 to 1000"),
        ("1e999999", "not a decimal number"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("sqrt(-1)", "negative"),
        ("(-8)**0.5", "negative"),
        ("(-8)**(1/3)", "negative"),
        ("(10**3000)**0.3", "too large"),
        ("__import__('os')", "not arithmetic"),
        ("(1).__class__", "not arithmetic"),
        ("[1 for x in y]", "not arithmetic"),
        ("max()", "does not take"),
        ("gcd(1.5, 2)", "does not take"),
        ("round(1, 10**9)", "does not take"),
        ("True + 1", "not arithmetic"),
        ("0x10", "not a decimal number"),
        ("1 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("-" * 999 + "1", "not an arithmetic expression"),
        ("1" * 1001, "longer than"),
    ],
)
def test_the_calculator_says_what_it_cannot_do(expression: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        calculator(expression)


@given(st.text(st.sampled_from("0123456789+-*/%^().,e xsqrtabmingcd_"), max_size=30) | st.text(max_size=10))
def test_no_expression_crashes_the_calculator(expression: str) -> None:
    with suppress(ToolError):
        assert calculator(expression)


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000), st.sampled_from("+-*"))
def test_sums_and_products_are_those_of_fractions(one: Fraction, other: Fraction, sign: str) -> None:
    found = calculator(f"({one.numerator}/{one.denominator}) {sign} ({other.numerator}/{other.denominator})")
    expected = {"+": one + other, "-": one - other, "*": one * other}[sign]
    assert Fraction(found.split(" =")[0]) == expected


# -- functions -------------------------------------------------------------------------------------------------


class Place(BaseModel):
    city: str
    country: str = "any"


async def weather(place: Place, days: int = 1, unit: Literal["C", "F"] = "C", *, offset: int = 0) -> dict[str, Any]:
    """The weather somewhere.

    Args:
        place: where; a city
            and its country.
        days: how many
    Returns:
        degrees
    """
    return {"city": place.city, "degrees": 20 + days + offset, "unit": unit}


def slow(seconds: float) -> str:
    import time

    time.sleep(seconds)
    return "late"


def of_task(task: Task, key: str) -> str:
    return str(task.metadata[key])


def test_a_function_s_schema_comes_from_its_types_and_docstring() -> None:
    made = FunctionTool(weather)
    assert made.description == "The weather somewhere."
    properties = made.schema["properties"]
    assert list(properties) == ["place", "days", "unit"]
    assert made.schema["required"] == ["place"]
    assert made.schema["additionalProperties"] is False
    assert properties["days"] == {"type": "integer", "description": "how many", "default": 1}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert properties["place"]["description"] == "where; a city and its country."
    json.dumps(made.schema)


def test_users_functions_are_tools() -> None:
    for function in (weather, slow, of_task):
        tool(function)
    from rollmill.config.components import ToolConfig

    read = TypeAdapter(ToolConfig).validate_python
    sections = [
        read({"name": "weather", "offset": 5, "called": "w", "result_chars": 200}),
        read({"name": "slow", "time_limit_s": 0.05}),
        read("of_task"),
    ]
    found, tools, counters = used(
        sections,
        ("w", {"place": {"city": "Oslo"}, "days": 2}),
        ("w", {"place": {"city": "x" * 300}}),
        ("w", {"place": "Oslo", "day": 1}),
        ("slow", {"seconds": 0.3}),
        ("of_task", {"key": "note"}),
        ("of_task", {"key": "none"}),
        ("weather", {}),
    )
    assert [each.ok for each in found] == [True, True, False, False, True, False, False]
    assert json.loads(found[0].content) == {"city": "Oslo", "degrees": 27, "unit": "C"}
    assert "characters left out" in found[1].content
    assert "place: Input should be" in found[2].content
    assert "day: Extra inputs are not permitted" in found[2].content.replace("\n", " ")
    assert found[3].content == "Error: no result after 0.05 s"
    assert found[4].content == "of the task"
    assert found[5].content == "Error: KeyError: 'none'"
    assert found[6].content == "Error: there is no tool `weather`; there are w, slow, of_task"
    assert (tools.calls, tools.errors) == (7, 4)
    assert (counters["w/calls"], counters["w/errors"], counters["unknown"]) == (3, 1, 1)
    assert counters["slow/seconds"] >= 0.05
    assert "task" not in json.dumps(tools.descriptions[2]["function"]["parameters"])


def test_a_tool_that_never_returns_fails_its_rollout_in_the_end() -> None:
    tool(slow)
    from rollmill.config.components import ToolConfig

    sections = [TypeAdapter(ToolConfig).validate_python({"name": "slow", "time_limit_s": 0.01})]
    with pytest.raises(WorkflowError, match=r"`slow` did not return within 0.01 s: 9 threads are stuck in `slow`"):
        used(sections, *[("slow", {"seconds": 5.0})] * 10)


def test_what_a_call_echoes_can_be_encoded() -> None:
    found, _, _ = used([CalculatorTool()], ("calculator", {"\ud800": 1}))
    assert found[0].content.encode().startswith(b"Error: wrong arguments")


def test_a_result_that_is_no_json_is_told() -> None:
    def pairs() -> dict[tuple[int, int], int]:
        return {(1, 2): 3}

    tool(pairs)
    from rollmill.config.components import ToolConfig

    found, _, _ = used([TypeAdapter(ToolConfig).validate_python("pairs")], ("pairs", {}))
    assert found[0].content.startswith("Error: TypeError: keys must be str")


@pytest.mark.parametrize("value", [np.float64(3.5), np.int64(4), np.zeros(2), [np.float64(1)], np.zeros((2, 2))])
def test_numbers_of_numpy_are_no_pictures(value: Any) -> None:
    assert picture_parts(value, "tool") is None


def test_pixels_of_a_tool_are_a_picture() -> None:
    [part] = picture_parts(np.zeros((2, 3, 3), np.uint8), "tool") or []
    assert part["image"].startswith("data:image/png;base64,")


def test_texts_beside_pictures_are_cut_together(tmp_path: Path) -> None:
    async def call(_: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": letter * 60} for letter in "XYZ"]

    toolbox = Toolbox([Tool("t", "", {}, call)], {"t": 100}, {}, folder=PictureFolder(tmp_path))
    result = asyncio.run(toolbox.call("t", {}))
    assert [result.text.count(letter) for letter in "XYZ"] == [60, 40, 0]


def test_a_search_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("apples")
    monkeypatch.setattr(BM25Index, "find", lambda *_: time.sleep(0.5))
    found, _, _ = used([SearchTool(path=tmp_path, time_limit_s=0.05)], ("search", {"query": "apples"}))
    assert found[0].content == "Error: no result after 0.05 s"


def test_a_parameter_without_a_type_is_named() -> None:
    def untyped(a) -> str:  # type: ignore[no-untyped-def]
        return str(a)

    with pytest.raises(ConfigError, match=r"test_tools.py:\d+: untyped: the parameter `a` needs a type"):
        tool(untyped)


# -- python ----------------------------------------------------------------------------------------------------


def test_programs_share_an_interpreter_that_is_started_anew_when_it_has_ended() -> None:
    found, _, counters = used(
        [PythonTool(time_limit_s=1, result_chars=200, sandbox="auto")],
        ("python", {"code": "x = 6\nprint('hi')"}),
        ("python", {"code": "x * 7"}),
        ("python", {"code": "print('before'); 1 / 0"}),
        ("python", {"code": "print('a' * 1000)"}),
        ("python", {"code": "while True: pass"}),
        ("python", {"code": "x"}),
        ("python", {}),
    )
    assert [each.content for each in found[:2]] == ["hi", "42"]
    assert "before" in found[2].content
    assert "ZeroDivisionError" in found[2].content
    assert "800 characters left out" in found[3].content
    assert found[4].content == (
        "Error: the program was still running after 1 s; the interpreter has ended, and its names are lost"
    )
    assert "NameError" in found[5].content
    assert "code: Field required" in found[6].content
    assert counters["python/errors"] == 4


def test_programs_may_begin_with_nothing() -> None:
    found, _, _ = used([PythonTool(state="call")], ("python", {"code": "x = 6\nx"}), ("python", {"code": "x"}))
    assert [each.ok for each in found] == [True, False]


# -- search ----------------------------------------------------------------------------------------------------


def test_search_finds_passages_by_their_words(tmp_path: Path) -> None:
    rows = [
        {"title": "Oslo", "text": "Oslo is the capital of Norway.\n\nIt lies at a fjord."},
        {"text": "巴黎是法国的首都。"},
        {"title": "Rome", "text": "Rome is the capital of Italy."},
    ]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = SearchTool(path=tmp_path / "facts.jsonl", top_k=2)
    asked = ["capital of NORWAY", "法国", "zebra", "!?", "the"]
    found, _, _ = used([section], *(("search", {"query": each}) for each in asked))
    texts = [each.content for each in found]
    assert texts[0].startswith("[1] Oslo\nOslo is the capital")
    assert texts[0].count("[") == 2
    assert texts[1] == "[1] 巴黎是法国的首都。"
    assert texts[2] == texts[3] == "nothing was found"


def test_folders_are_searched_and_long_documents_cut(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.md").write_text("one two three\n\nfour five\n\n" + "six " * 25)
    (tmp_path / "b.txt").write_text("seven")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    section = SearchTool(path=tmp_path, passage_words=10)
    found, _, _ = used([section], ("search", {"query": "four"}), ("search", {"query": "seven"}))
    assert found[0].content == "[1] deep/a\none two three\n\nfour five"
    assert found[1].content == "[1] b\nseven"
    assert [len(each.split()) for each in split_passages("six " * 25, 10)] == [10, 10, 5]


@given(st.lists(st.text("ab \n", max_size=30), max_size=6).map("\n\n".join), st.integers(1, 8))
def test_passages_hold_all_words_and_are_short(text: str, most: int) -> None:
    passages = split_passages(text, most)
    assert " ".join(passages).split() == text.split()
    assert all(0 < len(each.split()) <= most for each in passages)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"title": "x"}', r"a.jsonl:1: expected an object with a `text`"),
        ("a.jsonl", "{", "a.jsonl:1: not valid JSON"),
        ("a.jsonl", "", "holds no text"),
        ("a.pdf", "", "neither a .jsonl file nor a folder"),
    ],
)
def test_documents_that_cannot_be_searched(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        ToolPool([SearchTool(path=tmp_path / name)])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called `calculator`"):
        ToolPool([CalculatorTool(), CalculatorTool()])


def test_what_a_rollout_opened_is_closed_with_it() -> None:
    pool = ToolPool([PythonTool(sessions=1)])

    async def run() -> list[str]:
        texts = []
        for _ in range(2):  # with one session at a time the second would wait for ever
            rollout: Any = Rollout("g/0", TASK, "g", 0, 0, 0, None, None, None)  # type: ignore[arg-type]
            async with pool.one(rollout) as tools, asyncio.timeout(60), AsyncExitStack():
                texts.append((await tools.call("python", {"code": "1 + 1"})).content)
        return texts

    try:
        assert asyncio.run(run()) == ["2", "2"]
    finally:
        pool.close()
