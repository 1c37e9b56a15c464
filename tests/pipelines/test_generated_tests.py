"""Generated tests that successes have to pass, in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.made_up import context, group, pipeline, rewards

from rollmill.types import Experience, Task
from rollmill_sandbox import Sandbox, SandboxError

OPTIONS = {"name": "test_cases", "submissions": 3, "agree": 2, "solve": 2, "cases": 6}
VISIBLE = [{"stdin": "2 3", "stdout": "5"}]
TASK = Task("t0", "Add.", metadata={"tests": VISIBLE, "generator": "n = int(input())\nprint(n, 7 * n)"})
RIGHT = [
    "print(sum(map(int, input().split())))",
    "a, b = map(int, input().split())\nprint(a + b)",
    "print(eval(input().replace(' ', '+')))",
]
WRONG = "input()\nprint(5)"  # passes the visible test


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(f"no sandbox: {error}")


def run(made: Any, experiences: list[Experience], task: Task = TASK) -> list[Experience]:
    found: list[Experience] = asyncio.run(made.process(experiences, context(task=lambda _: task)))
    return found


def test_programs_in_reasoning_are_no_submissions() -> None:
    made = pipeline(OPTIONS)
    thoughts = f"<think>\n```python\n{WRONG}\n```\n"
    run(made, group([1.0, 1.0], text=[f"{thoughts}</think>\n```python\n{RIGHT[0]}\n```", thoughts]))
    [[_, programs, *_]] = made.state_dict()["test_cases"]["tasks"]
    assert [program.strip() for program in programs] == [RIGHT[0]]
    made.close()


def test_later_successes_have_to_pass_generated_tests() -> None:
    made = pipeline(OPTIONS)
    assert rewards(run(made, group([1.0, 1.0, 0.0], text=[RIGHT[0], WRONG, "print("]))) == [
        1.0,
        1.0,
        0.0,
    ]  # too few yet
    first = json.loads(json.dumps(made.state_dict()))
    found = run(made, group([1.0, 1.0], name="g1", text=[RIGHT[1], WRONG]))
    assert made.take_reports()["test_cases"].changes == {"tests made": 1, "passed": 1, "failed generated tests": 1}
    assert rewards(found) == [1.0, 0.0]
    assert found[1].reward_parts["pipeline/test_cases"] == -1.0
    again = pipeline(OPTIONS)
    again.load_state_dict(first)
    assert rewards(run(again, group([1.0, 1.0], name="g1", text=[RIGHT[1], WRONG]))) == [1.0, 0.0]
    assert again.state_dict() == made.state_dict()
    tests = made.state_dict()["test_cases"]["tasks"][0][2]
    assert [(each["stdin"], each["stdout"]) for each in tests][:2] == [("1 7\n", "8\n"), ("2 14\n", "16\n")]
    made.close()
    again.close()


def test_submissions_that_do_not_agree_make_no_tests() -> None:
    made = pipeline({**OPTIONS, "solve": 3})
    found = run(made, group([1.0] * 3, text=[RIGHT[0], RIGHT[1], WRONG]))
    assert rewards(found) == [1.0] * 3
    assert made.take_reports()["test_cases"].changes == {"no sound tests": 1}
    made.close()


def test_functions_are_tested_by_calls() -> None:
    columns = {
        "entry_point": "square",
        "tests": [{"args": [2], "expected": 4}],
        "generator": "print([int(input())])",
    }
    texts = ["def square(x):\n    return x * x", "def square(x):\n    return x ** 2", "square = lambda x: x + 2"]
    made = pipeline({**OPTIONS, "code": {"name": "code", "time_limit_s": 4}})
    found = run(made, group([1.0] * 3, text=texts), Task("t0", "Square.", metadata=columns))
    assert rewards(found) == [1.0, 1.0, 0.0]
    made.close()


def test_tasks_without_a_generator_are_left_alone() -> None:
    made = pipeline(OPTIONS)
    task = Task("t0", "Add.", metadata={"tests": VISIBLE})
    assert rewards(run(made, group([1.0] * 4, text=[*RIGHT, WRONG]), task)) == [1.0] * 4
    assert made.state_dict() == {"test_cases": {"tasks": []}}
    made.close()


def test_programs_that_take_too_long_make_no_tests_and_do_not_end_the_run() -> None:
    slow = [f"import time\ntime.sleep({n}5)\nprint(5)" for n in range(3)]
    code = {"name": "code", "time_limit_s": 60}
    made = pipeline(OPTIONS | {"code": code})
    found = asyncio.run(made.process(group([1.0] * 3, text=slow), context(task=lambda _: TASK, deadline_s=2.0)))
    assert rewards(found) == [1.0] * 3
    assert made.take_reports()["test_cases"].changes == {"tests too slow": 1}
    assert made.state_dict()["test_cases"]["tasks"] == [["t0", [], []]]
    made.close()
