"""Generated tests: which cases are valid, which problems are kept (Kimi k1.5, arXiv:2501.12599)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.reward_helpers import judged

from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.code import CodeReward
from rollmill.rewards.code.comparison import OutputMatchOptions
from rollmill.rewards.code.generation import CodingProblem, GeneratedTestCases, ValidationCriteria, generate_tests
from rollmill_sandbox import Sandbox, SandboxLimits

NUMBERS = "import random\nrandom.seed(int(input()))\nprint(random.randint(-10**6, 10**6))"
RIGHT = "print(abs(int(input())))"
NEVER_NEGATIVE = "print(int(input()))"
"""Wrong for negative numbers, which are about half of the cases."""
CRASHES = "print(1 // 0)"
FEW = ValidationCriteria(cases=3)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SandboxLimits(wall_s=1.0), jobs=2) as made:
        yield made


def generated(
    sandbox: Sandbox, problem: CodingProblem, demands: ValidationCriteria = FEW, rules: OutputMatchOptions | None = None
) -> GeneratedTestCases:
    return asyncio.run(generate_tests(problem, sandbox, demands, rules))


@pytest.mark.parametrize(
    ("wrong", "valid", "solved", "kept"),
    [(0, 3, 10, True), (1, 3, 9, True), (2, 3, 8, False), (3, 3, 7, False), (4, None, None, False)],
)
def test_seven_of_ten_agree_and_nine_of_ten_pass(
    sandbox: Sandbox, wrong: int, valid: int | None, solved: int | None, kept: bool
) -> None:
    problem = CodingProblem(NUMBERS, [CRASHES] * wrong + [RIGHT] * (10 - wrong))
    found = generated(sandbox, problem)
    assert found.cases == 3
    if kept:
        assert (len(found.tests), found.reason) == (3, None)
        assert all(test["stdout"].strip() == str(abs(int(test["stdin"]))) for test in found.tests)
    elif valid is None:
        assert found.reason == "7 of 10 submissions agree on none of the 3 cases"
    else:
        assert (found.valid, found.solved, found.tests) == (valid, solved, [])
        assert found.reason == f"{solved} of 10 submissions pass all 3 valid cases; 9 are needed"


def test_cases_on_which_too_few_agree_are_left_out(sandbox: Sandbox) -> None:
    """Four of ten are wrong for negative numbers: those cases are no tests, and all ten pass the others."""
    found = generated(sandbox, CodingProblem(NUMBERS, [NEVER_NEGATIVE] * 4 + [RIGHT] * 6), ValidationCriteria(cases=6))
    assert found.solved == 10
    assert 0 < found.valid < found.cases == 6
    assert all(int(test["stdin"]) >= 0 for test in found.tests)


def test_what_most_agree_on_is_expected_even_where_the_first_is_wrong(sandbox: Sandbox) -> None:
    found = generated(sandbox, CodingProblem(NUMBERS, [NEVER_NEGATIVE] + [RIGHT] * 9))
    assert (found.valid, found.solved) == (3, 9)
    assert all(int(test["stdout"]) >= 0 for test in found.tests)


def test_cases_are_different_and_the_same_every_time(sandbox: Sandbox) -> None:
    parity = "print(int(input()) % 2)"
    found = generated(sandbox, CodingProblem(parity, ["print(input())"] * 10))
    assert [test["stdin"] for test in found.tests] == ["1\n", "0\n"]
    assert found == generated(sandbox, CodingProblem(parity, ["print(input())"] * 10))


@pytest.mark.parametrize(
    ("generator", "submissions", "reason"),
    [
        (NUMBERS, [RIGHT] * 9, "9 submissions of 10"),
        ("1 / 0", [RIGHT] * 10, "the generator makes no cases"),
        (
            NUMBERS,
            ["import time, random\nprint(random.random())"] * 10,
            "7 of 10 submissions agree on none of the 3 cases",
        ),
    ],
)
def test_what_drops_a_problem(sandbox: Sandbox, generator: str, submissions: list[str], reason: str) -> None:
    assert generated(sandbox, CodingProblem(generator, submissions)).reason == reason


def test_outputs_agree_within_the_rules(sandbox: Sandbox) -> None:
    submissions = [f"print(1 / 3 + {n}e-9)" for n in range(10)]
    near = generated(sandbox, CodingProblem(NUMBERS, submissions), rules=OutputMatchOptions(compare="tokens"))
    assert len(near.tests) == 3
    assert generated(sandbox, CodingProblem(NUMBERS, submissions)).tests == []


FUNCTION = "def top(xs, k): return sorted(xs)[-k:], {len(xs)}"


def test_functions_get_tests_that_the_reward_reads(sandbox: Sandbox) -> None:
    generator = "import random\nrandom.seed(int(input()))\nprint([[random.random() for _ in range(5)], 2])"
    wrong = "def top(xs, k): return xs[-k:], {len(xs)}"
    found = generated(sandbox, CodingProblem(generator, [FUNCTION] * 9 + [wrong], "top"))
    assert (len(found.tests), found.solved) == (3, 9)
    assert found.tests[0]["kind"] == "generated"
    columns: dict[str, Any] = {"tests": found.tests}
    with build_reward_manager([CodeReward(name="code", time_limit_s=2.0, jobs=1)]) as judge:
        assert judged(judge, None, FUNCTION, **columns).reward == 1.0
        assert judged(judge, None, wrong, **columns).reward == 0.0


def test_a_function_of_ones_own_makes_cases(sandbox: Sandbox) -> None:
    found = generated(sandbox, CodingProblem(lambda number: [list(range(number)), 1], [FUNCTION] * 10, "top"))
    assert [test["args"][0] for test in found.tests][:2] == ["[0]", "[0, 1]"]
    text = generated(sandbox, CodingProblem(lambda number: f"{-number}\n", [RIGHT] * 10))
    assert [test["stdout"] for test in text.tests] == [f"{n}\n" for n in range(1, 4)]


def test_values_that_no_literal_writes_are_no_tests(sandbox: Sandbox) -> None:
    found = generated(
        sandbox, CodingProblem(lambda number: [number], ["def f(x): return float('nan') if x > 2 else x"] * 10, "f")
    )
    assert [test["expected"] for test in found.tests] == ["1", "2"]


@pytest.mark.parametrize("keys", [{"agree": 11}, {"solve": 0}, {"submissions": 5}])
def test_demands_that_cannot_be_met(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"it has to be from 1 to submissions"):
        ValidationCriteria(**keys)


def test_the_defaults_are_those_of_the_paper() -> None:
    assert ValidationCriteria() == ValidationCriteria(cases=50, submissions=10, agree=7, solve=9)
