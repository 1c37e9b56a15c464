"""One rule for all rewards: what is reasoning, what is the answer, what is unfinished."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.reward_helpers import completion, judged, task
from support.rule_helpers import group, judge_of, reward, verdict

from rollmill.apps.audit.oracle import wrap_answer
from rollmill.apps.audit.reward_hacks import REWARD_HACKS
from rollmill.errors import ConfigError
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rewards.grading import completion_from_text
from rollmill.types import ParsedReply, Task, ToolCall

HACKS = {hack.name: hack.texts for hack in REWARD_HACKS}
ATTACKS = ("answer_in_reasoning", "unfinished_reasoning", "code_in_reasoning")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '{"name": "add", "arguments": {"a": 1}}'
SQUARE = "def square(x):\n    return x * x"
TABLE = "| a | b |\n|---|---|\n| x | 1 |"

CASES: list[tuple[str, dict[str, Any], Any, dict[str, Any], str]] = [
    ("math", {}, "42", {}, "The answer is \\boxed{42}."),
    ("math", {"extract": "boxed"}, "42", {}, "\\boxed{42}"),
    ("math", {"extract": "hash"}, "42", {}, "#### 42"),
    ("math", {"extract": "last_number"}, "42", {}, "so 42"),
    ("k12", {}, "B", {"options": {"A": "cat", "B": "dog"}}, "The answer is B"),
    ("k12", {}, 42, {}, "The answer is 42"),
    ("k12", {}, "", {"k12": {"type": "short", "keywords": ["light"]}}, "Answer: light"),
    ("exact", {}, "42", {}, "42"),
    ("exact", {"after": "Answer:"}, "42", {}, "Answer: 42"),
    ("exact", {"after": "</think>"}, "42", {}, "42"),
    ("code", {}, None, {"entry_point": "square", "tests": [{"args": [3], "expected": 9}]}, f"```python\n{SQUARE}\n```"),
    ("code", {"extract": "whole"}, None, {"entry_point": "square", "tests": [{"args": [3], "expected": 9}]}, SQUARE),
    ("format", {"json_schema": {"type": "object"}}, None, {}, '```json\n{"a": 1}\n```'),
    ("format", {"json_schema": {"type": "object"}, "whole": True}, None, {}, '{"a": 1}'),
    ("format", {"sections": ["Plan"]}, None, {}, "## Plan\nfirst this"),
    ("citation", {}, None, {"facts": ["The tower is tall."], "citations": [1]}, "It is tall [1]."),
    ("tool_call", {}, None, {"tools": TOOLS}, f"<tool_call>{CALL}</tool_call>"),
    ("tool_call", {"syntax": "json"}, None, {"tools": TOOLS}, CALL),
    ("count", {}, 4, {}, "There are 4 cats."),
    ("ocr", {}, "EXIT", {}, "EXIT"),
    ("ocr", {"tag": "answer"}, "EXIT", {}, "<answer>EXIT</answer>"),
    ("chart", {}, "12.5", {}, "The answer is 12.5"),
    ("table", {}, TABLE, {}, TABLE),
    ("vqa", {}, "red", {}, "red"),
    ("boxes", {}, [1, 2, 30, 40], {}, "[1, 2, 30, 40]"),
    ("grounding", {}, None, {}, '[{"bbox_2d": [1, 2, 30, 40], "label": "cat"}]'),
    ("points", {}, [[5, 5, 20, 20]], {}, "(10, 10)"),
]


@pytest.mark.parametrize(("name", "keys", "gold", "columns", "right"), CASES)
def test_rewards_of_an_answer_read_what_follows_the_reasoning(
    name: str, keys: dict[str, Any], gold: Any, columns: dict[str, Any], right: str
) -> None:
    wrong = "No idea at all."
    with judge_of(name, **keys) as judge:

        def of(text: str) -> tuple[Any, str]:
            found = judged(judge, gold, text, **columns)
            return found.reward, found.outcomes[name]

        assert of(f"<think>\n{wrong}\n</think>\n\n{right}") == (1.0, "ok")
        assert of(f"{wrong}\n</think>\n{right}") == (1.0, "ok")
        for thought in (f"<think>{right}</think>", f"{right}\n</think>", f"\n<think>\n{right}\n</think>\n\n"):
            assert of(f"{thought}{wrong}")[0] == 0.0
        for unfinished in (f"<think>{right}", f" \n<think>\n{right}\n"):
            assert of(unfinished) == (0.0, "no_answer")
        if keys.get("after") != "</think>":
            assert of(right) == (1.0, "ok")


def test_no_text_passes_where_the_reasoning_is_unfinished() -> None:
    """Nothing is right for these tasks, but not if it is only not written yet."""
    assert verdict("exact", "", "<think>hm") == (0.0, "no_answer")
    assert verdict("tool_call", None, "<think>hm", {"tools": TOOLS, "tool_calls": []}) == (0.0, "no_answer")
    assert verdict("tool_call", None, "<think>hm</think>no", {"tools": TOOLS, "tool_calls": []}) == (1.0, "ok")
    assert verdict("grounding", None, "<think>hm", fewest=0) == (0.0, "no_answer")


def test_the_answer_begins_after_the_first_end_of_reasoning() -> None:
    text = "<think>a</think>The tag </think> ends it: \\boxed{1}"
    assert reward("math", "1", text) == 1.0
    assert reward("exact", "The tag </think> ends it: \\boxed{1}", text) == 1.0
    long = "<think>" + "wait, " * 10_000 + "\\boxed{2}</think>" + "x " * 15_000
    assert verdict("math", "2", long, extract="boxed") == (0.0, "no_answer")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    ("name", "keys", "solved"),
    [
        *(("math", {"extract": place}, Task("t", "q", "42")) for place in ("auto", "boxed", "hash", "last_number")),
        *(("exact", {"after": after}, Task("t", "q", "42")) for after in (None, "####", "</think>")),
        ("k12", {}, Task("t", "q", "B", metadata={"options": {"A": "cat", "B": "dog"}})),
        ("vqa", {}, Task("t", "q", "red")),
        *(
            (
                "code",
                {"extract": place},
                Task("t", "", None, SQUARE, {"entry_point": "square", "tests": [{"args": [3], "expected": 9}]}),
            )
            for place in ("auto", "fence", "whole")
        ),
    ],
)
def test_built_in_rewards_resist_answers_in_reasoning(
    name: str, keys: dict[str, Any], solved: Task, attack: str
) -> None:
    texts = HACKS[attack](solved, [])
    with judge_of(name, **keys) as judge:
        found = [asyncio.run(judge.score(solved, completion_from_text(solved, text))).reward for text in texts]
    assert set(found) <= {0.0}


def test_attacks_are_not_the_answer() -> None:
    """A task whose answer is that nobody knows is left out; others are attacked in every form."""
    assert HACKS["answer_in_reasoning"](Task("t", "q", "I do not know"), []) == []
    assert len(HACKS["answer_in_reasoning"](Task("t", "q", "D"), [])) == 3
    assert all(
        form in HACKS["unfinished_reasoning"](Task("t", "q", "D"), [])[0] for form in [*wrap_answer("D").values()][:5]
    )


def test_the_reply_of_a_chat_has_precedence_over_tags() -> None:
    """Models without `<think>` mark their reasoning otherwise; their renderer has taken the reply apart."""
    made = completion("analysis: 41 final: 42")
    made.reply = ParsedReply("42", "41")
    unfinished = completion("analysis: 42")
    unfinished.reply = ParsedReply("", "42", reasoning_finished=False)
    for name in ("exact", "math", "k12", "ocr"):
        with judge_of(name) as judge:
            found = [asyncio.run(judge.score(task("42"), each)) for each in (made, unfinished)]
        assert [(each.reward, each.outcomes[name]) for each in found] == [(1.0, "ok"), (0.0, "no_answer")]


def test_calls_that_the_renderer_has_read_count_in_any_syntax() -> None:
    made = completion("[TOOL_CALLS]add...")
    columns = {"tools": TOOLS, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

    def of(reply: ParsedReply | None, syntax: str) -> tuple[Any, str]:
        made.reply = reply
        with judge_of("tool_call", syntax=syntax) as judge:
            found = asyncio.run(judge.score(task(None, **columns), made))
        return found.reward, found.outcomes["tool_call"]

    for syntax in ("tags", "json"):
        assert of(ParsedReply("", tool_calls=[ToolCall("1", "add", {"a": 1})]), syntax) == (1.0, "ok")
        assert of(ParsedReply("", tool_calls=[ToolCall("1", "add", {"a": 2})]), syntax) == (0.0, "wrong_call")
        half = ParsedReply("[TOOL", tool_calls=[ToolCall("1", "add", {"a": 1})], malformed=["cut off"])
        assert of(half, syntax) == (pytest.approx(2 / 3), "malformed")
        assert of(ParsedReply("", "add", reasoning_finished=False), syntax) == (0.0, "no_answer")
    assert of(ParsedReply(f"<tool_call>{CALL}</tool_call>"), "tags") == (1.0, "ok")
    assert of(ParsedReply(CALL, "thought"), "json") == (1.0, "ok")


def test_rules_on_the_whole_text_read_the_reasoning() -> None:
    text = "<think>Denken wir nach, это так.</think>yes"
    assert reward("format", None, text, tags=["think"]) == 0.0  # text outside
    assert reward("format", None, "<think>a b</think><answer>c</answer>", tags=["think", "answer"]) == 1.0
    assert reward("format", None, text, pattern="^<think>.*</think>") == 1.0
    assert reward("language", None, text, language="en") == pytest.approx(4 / 6)
    assert reward("language", None, text, language="en", tag="think") == pytest.approx(3 / 5)
    loop = "<think>" + "and so on " * 60 + "</think>yes"
    assert reward("repetition", None, loop) < -0.5
    with judge_of("length", kind="overlong", longest=20, buffer=10) as judge:
        assert group(judge, None, [completion(loop)])[0].reward == -1.0


def test_prompts_may_open_the_reasoning() -> None:
    opened = Task("t", "What is 6 * 7?\nAssistant: <think>\n", "42")
    with judge_of("math") as judge:
        found = [
            asyncio.run(judge.score(opened, completion_from_text(opened, text)))
            for text in ("it is \\boxed{42}", "hm</think>\\boxed{42}")
        ]
    assert [(each.reward, each.outcomes["math"]) for each in found] == [(0.0, "no_answer"), (1.0, "ok")]


FUNCTIONS = """
def parts(task, completion, content, reasoning, scale=1):
    assert completion.text.endswith(content)
    return {"answer": scale * float(content == task.answer), "thoughts": float(len(reasoning or ""))}

def many(task, completions, reasoning):
    return [float(each is None) for each in reasoning]
many.group = True

def own(task, completion, content="mine"):
    return float(content == "mine")

def renamed(task, content):
    return float(len(content.text))

def trl(completions, answer, content, reasoning, **kwargs):
    assert len(completions) == len(content) == len(reasoning)
    return [float(text == right) for text, right in zip(content, answer)]

def trl_text(completions, answer, **kwargs):
    assert "content" not in kwargs
    return [float(text == right) for text, right in zip(completions, answer)]

def verl(solution_str, ground_truth, reasoning):
    return float(reasoning == "hm" and solution_str.endswith(ground_truth))

def verl_text(solution_str, ground_truth):
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "parts.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("run_in", ["auto", "process", "thread"])
def test_functions_get_the_parts_they_ask_for(functions: Path, run_in: Any) -> None:
    def of(name: str, text: str, columns: dict[str, Any] | None = None, **options: Any) -> list[float | None]:
        section = PythonReward(name="python", function=f"{functions}:{name}", options=options, run_in=run_in)
        with build_reward_manager([section]) as judge:
            return [*group(judge, "42", [completion(text)], **(columns or {}))[0].parts.values()]

    text = "<think>hm</think>42"
    assert of("parts", text, scale=3) == [3.0, 2.0]
    assert of("parts", "42") == [1.0, 0.0]
    assert of("parts", text, content="42", reasoning="") == [1.0, 0.0]
    assert of("many", text) == [0.0]
    assert of("many", "42") == [1.0]
    assert of("own", text) == [1.0]
    assert of("renamed", text) == [float(len(text))]
    assert of("trl", text) == [1.0]
    assert of("trl", text, {"content": "of the row"}) == [0.0]
    assert of("trl_text", text) == [0.0]
    assert of("verl", text) == [1.0]
    assert of("verl_text", text) == [0.0]


def test_functions_with_parts_take_only_their_own_options(functions: Path) -> None:
    section = PythonReward(name="python", function=f"{functions}:parts", options={"colour": 1})
    with pytest.raises(ConfigError, match="colour"):
        build_reward_manager([section])
