"""The code reward: outcomes, credit, layouts of tests, judges of the user's own, and generated tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.reward_helpers import completion, judged, task

from rollmill.cli import main
from rollmill.config.rewards import GateConfig, Reward, RewardManagerConfig
from rollmill.errors import ConfigError, RewardError
from rollmill.rewards import RewardManager, RewardResult, Score, build_reward_manager
from rollmill.rewards.builtin.code import CodeReward
from rollmill.rewards.code.tests import read_suite
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task

Make = Callable[..., RewardManager]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    """Makes a judge for each set of keys once, because a sandbox takes a while to start."""
    judges: dict[str, RewardManager] = {}

    def make(**keys: Any) -> RewardManager:
        config = CodeReward(name="code", **{"time_limit_s": 5.0, "jobs": 1} | keys)
        name = config.model_dump_json()
        if name not in judges:
            judges[name] = build_reward_manager([config])
        return judges[name]

    yield make
    for each in judges.values():
        each.close()


def of(judge: RewardManager, code: str, **columns: Any) -> RewardResult:
    return judged(judge, None, f"```python\n{code}\n```", **columns)


SQUARES: dict[str, Any] = {
    "entry_point": "square",
    "tests": [
        {"args": [2], "expected": 4, "kind": "visible"},
        {"args": [-3], "expected": 9, "kind": "hidden"},
        {"args": [0], "expected": 0, "kind": "hidden", "weight": 2},
    ],
}
SUMS: dict[str, Any] = {"tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]}
CHECKED: dict[str, Any] = {"entry_point": "square", "test": "def check(candidate):\n    assert candidate(3) == 9\n"}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("def square(x): return x * x", "ok"),
        ("def square(x): return x * 2", "wrong_answer"),
        ("def square(x) return x", "compile_error"),
        ("def square(x):\nreturn x", "compile_error"),
        ("x = '\0'", "compile_error"),
        ("1 / 0", "runtime_error"),
        ("def square(x): return x / 0", "runtime_error"),
        ("def squared(x): return x * x", "runtime_error"),
        ("import os\ndef square(x): os.abort()", "runtime_error"),
        ("def square(x):\n    while True: pass", "timeout"),
        ("def square(x): return ' ' * (1 << 40)", "memory"),
        ("def square(x):\n    while True: print('x' * 10000)", "output"),
        ("def square(x): return 'x' * (2 << 20)", "output"),
    ],
)
@pytest.mark.parametrize("columns", [SQUARES, CHECKED], ids=["data", "check"])
def test_outcomes_of_functions(made: Make, columns: dict[str, Any], code: str, outcome: str) -> None:
    found = of(made(time_limit_s=0.5 if outcome == "timeout" else 5.0), code, **columns)
    assert (found.outcomes, found.reward) == ({"code": outcome}, float(outcome == "ok"))


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(sum(map(int, input().split())))", "ok"),
        ("print(sum(map(int, input().split())), end='   \\n\\n')", "ok"),
        ("print('3')", "wrong_answer"),
        ("print(", "compile_error"),
        ("print(int(input()))", "runtime_error"),
        ("print(3)\nimport sys\nsys.exit(1)", "runtime_error"),
        ("while True: pass", "timeout"),
        ("x = ' ' * (1 << 40)", "memory"),
        ("while True: print('x' * 10000)", "output"),
    ],
)
def test_outcomes_of_programs(made: Make, code: str, outcome: str) -> None:
    found = of(made(time_limit_s=0.5 if outcome == "timeout" else 5.0), code, **SUMS)
    assert (found.outcomes, found.reward) == ({"code": outcome}, float(outcome == "ok"))


def test_no_code_and_too_much_of_it(made: Make) -> None:
    judge = made(extract="fence")
    assert judged(judge, None, "I do not know.", **SQUARES).outcomes == {"code": "no_code"}
    assert judged(judge, None, "```python\n" + "x" * 500_000, **SQUARES).outcomes == {"code": "too_long"}
    assert judged(judge, None, "def square(x): return 1").outcomes == {"code": "not_applicable"}


def test_credit_weights_and_details(made: Make) -> None:
    half = "def square(x): return abs(x) * 2 if x == 2 else x"  # right for 2 and 0
    every, part = of(made(), half, **SQUARES), of(made(credit="fraction"), half, **SQUARES)
    assert (every.reward, part.reward) == (0.0, pytest.approx(3 / 4))
    assert every.outcomes == part.outcomes == {"code": "wrong_answer"}
    assert part.parts == {"code": pytest.approx(3 / 4)}
    assert part.details == every.details == {"code/visible": 1.0, "code/hidden": pytest.approx(2 / 3)}
    seen = of(made(kinds=["visible"]), half, **SQUARES)
    assert (seen.reward, seen.details) == (1.0, {"code/visible": 1.0})
    assert of(made(kinds=["generated"]), half, **SQUARES).reward is None


def test_many_tests_of_uneven_weight_sum_to_one(made: Make) -> None:
    tests = [{"args": [n], "expected": n * n, "weight": 0.1 + n / 7} for n in range(20)]
    assert of(made(credit="fraction"), "def f(x): return x * x", entry_point="f", tests=tests).reward == 1.0


def test_other_tests_go_on_after_one_that_ends_the_process(made: Make) -> None:
    code = "import os, time\ndef square(x):\n    if x == 2: {}\n    return x * x"
    for end in ("os._exit(1)", "time.sleep(60)", "' ' * (1 << 40)", "1 / 0", "print('x' * (2 << 20))"):
        found = of(made(credit="fraction", time_limit_s=1.0), code.format(end), **SQUARES)
        assert found.reward == pytest.approx(3 / 4)
        assert found.details == {"code/visible": 0.0, "code/hidden": 1.0}


@pytest.mark.slow
def test_the_limit_of_all_tests_ends_them(made: Make) -> None:
    tests = [{"args": [n], "expected": n} for n in range(40)]
    judge = made(credit="fraction", time_limit_s=1.0, total_limit_s=2.5, timeout_reward=-0.5)
    found = of(judge, "import time\ndef f(x): time.sleep(60)", entry_point="f", tests=tests)
    assert (found.reward, found.outcomes) == (-0.5, {"code": "timeout"})
    assert found.seconds < 10
    found = of(judge, "import time\ndef f(x):\n    if x: time.sleep(60)\n    return x", entry_point="f", tests=tests)
    assert (found.reward, found.outcomes) == (pytest.approx(1 / 40), {"code": "timeout"})


def test_one_job_judges_many_completions_of_every_sort_at_once(made: Make) -> None:
    """A check needs two sessions; they must not wait for each other's turn."""
    judge = made(jobs=1)
    code = completion("def square(x): return x * x\nif __name__ == '__main__': print(sum(map(int, input().split())))")

    async def all_of_them() -> list[RewardResult]:
        tasks = [task(None, **columns) for columns in (SQUARES, CHECKED, SUMS) for _ in range(5)]
        return await asyncio.gather(*(judge.score(each, code) for each in tasks))

    assert [each.reward for each in asyncio.run(all_of_them())] == [1.0] * 15
    assert [each.reward for each in asyncio.run(all_of_them())] == [1.0] * 15  # in another event loop


def test_data_tests_say_what_they_call(made: Make) -> None:
    judge = made()
    literals = [
        {"call": "f", "args": ["(1, {2})"], "kwargs": {"k": "b'x'"}, "expected": "({2}, b'x')", "literals": True}
    ]
    assert of(judge, "def f(pair, k): return pair[1], k", tests=literals).reward == 1.0
    assert of(judge, "def f(pair, k): return pair[0], k", tests=literals).reward == 0.0
    method = [{"call": "Solution.twice", "args": [[1]], "expected": [2]}]
    assert of(judge, "class Solution:\n    def twice(self, xs): return [2 * x for x in xs]", tests=method).reward == 1.0
    raising = [{"call": "f", "args": [0], "raises": "ArithmeticError"}]
    assert of(judge, "def f(x): return 1 / x", tests=raising).reward == 1.0
    assert of(judge, "def f(x): raise ValueError", tests=raising).outcomes == {"code": "runtime_error"}
    assert of(judge, "def f(x): return 'ZeroDivisionError'", tests=raising).outcomes == {"code": "wrong_answer"}
    as_text = json.dumps([{"call": "f", "args": [], "expected": None}])
    assert of(judge, "def f(): pass", tests=as_text).reward == 1.0
    table: dict[str, Any] = dict.fromkeys(("args", "expected", "stdin", "stdout", "raises", "call", "literals"))
    for row in (
        {"call": "f", "args": [2], "expected": 4},
        {"call": "f", "args": ["0"], "raises": "KeyError", "literals": True},
    ):
        code = "def f(x):\n    if x: return x * x\n    raise KeyError"
        assert of(judge, code, tests=[table | row]).reward == 1.0
    assert of(judge, "print(input())", tests=[table | {"stdin": "1", "stdout": "1"}]).reward == 1.0


def test_asserts_call_the_functions_of_the_solution(made: Make) -> None:
    judge = made(credit="fraction")
    columns: dict[str, Any] = {
        "test_list": ["assert add(1, 2) == 3", "assert math.isclose(half(3), 1.5)", "assert add('a', 'b') == 'ab'"],
        "test_setup_code": "import math",
    }
    assert of(judge, "def add(a, b): return a + b\ndef half(x): return x / 2", **columns).reward == 1.0
    assert of(judge, "def add(a, b): return 3\ndef half(x): return x / 2", **columns).reward == pytest.approx(2 / 3)
    assert of(judge, "def add(a, b): return a + b", **columns).reward == pytest.approx(2 / 3)
    dies = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b\ndef half(x): return x / 2"
    assert of(judge, dies, **columns).reward == pytest.approx(2 / 3)


CHECKS = {
    "changed in place": (
        "def f(xs, d, s):\n    xs[0].append(9)\n    xs.append(xs.pop(0))\n    d['k'].add(1)\n    s.clear()",
        "xs, d, s = [[1], [2]], {'k': set()}, {5}\n    assert candidate(xs, d, s) is None\n"
        "    assert (xs, d, s) == ([[2], [1, 9]], {'k': {1}}, set())",
    ),
    "an object inside stays the same": (
        "def f(xs): xs[0][0] = 7",
        "row = [1]\n    candidate([row, 2])\n    assert row == [7]",
    ),
    "a tuple of lists": ("def f(pair): pair[1].append(3)", "xs = []\n    candidate(([], xs))\n    assert xs == [3]"),
    "keyword arguments": ("def f(a, *, b=1): return a - b", "assert candidate(5, b=3) == 2"),
    "exceptions": (
        "class Mine(KeyError): pass\ndef f(x): raise Mine('gone')",
        "try:\n        candidate(1)\n    except KeyError as error:\n        assert 'gone' in str(error)\n"
        "    else:\n        raise AssertionError",
    ),
    "floats": (
        "def f(): return float('inf'), float('nan'), -0.0",
        "a, b, c = candidate()\n    assert a == float('inf') and b != b and str(c) == '-0.0'",
    ),
    "an iterator": ("def f(n):\n    yield from range(n)", "assert list(candidate(3)) == [0, 1, 2]"),
    "types": (
        "def f(): return [True, 1, 1.0, (1,), {1: 'x'}, b'x']",
        "assert repr(candidate()) == \"[True, 1, 1.0, (1,), {1: 'x'}, b'x']\"",
    ),
    "large numbers": ("def f(n): return 7 ** n", "assert candidate(9000) == 7 ** 9000"),
    "the function by its own name": ("def f(n): return n", "assert candidate(3) == f(3) == 3"),
    "state between calls": (
        "calls = []\ndef f(): calls.append(1); return len(calls)",
        "assert [candidate(), candidate()] == [1, 2]",
    ),
    "the same function of its own random numbers": (
        "import random\ndef f(): random.seed(0); return 5",
        "import random\n    random.seed(1)\n    x = random.random()\n"
        "    random.seed(1)\n    candidate()\n    assert random.random() == x",
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_see_what_functions_do(made: Make, name: str) -> None:
    code, body = CHECKS[name]
    found = of(made(), code, entry_point="f", test=f"def check(candidate):\n    {body}\n")
    assert (found.reward, found.outcomes) == (1.0, {"code": "ok"})
    wrong = of(
        made(), "def f(*args, **kwargs): return 'wrong'", entry_point="f", test=f"def check(candidate):\n    {body}\n"
    )
    assert wrong.reward == 0.0 or name == "the same function of its own random numbers"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def check(candidate):\n    assert candidate(undefined) == 1", "name 'undefined' is not defined"),
        ("import missing_module\ndef check(candidate): pass", "No module named 'missing_module'"),
        ("def check(candidate):\n    candidate(lambda x: x)", "an object of type function"),
        ("def check(candidate):\n    candidate([0] * 1_000_001)", "the test passes a value that is too large"),
    ],
)
def test_checks_that_are_wrong_in_themselves_have_an_outcome_of_their_own(
    made: Make, test: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = of(made(), "def f(x): return x", entry_point="f", test=test)
    assert (found.reward, found.outcomes) == (0.0, {"code": "test_error"})
    assert message in caplog.text


TESTS = [
    ({"tests": 5}, "column `tests` is 5; the code reward needs a list of tests"),
    ({"tests": "[1"}, "column `tests` is text that is not JSON"),
    ({"tests": []}, "column `tests` is empty; leave it out"),
    ({"tests": [3]}, "test 1 of column `tests` is 3; it has to be a mapping"),
    ({"tests": [{"args": [1], "expected": 1}]}, "test 1 of column `tests`: no function to call"),
    ({"tests": [{"call": "f()", "expected": 1}]}, "no function to call"),
    ({"tests": [{"call": "f", "args": [1]}]}, "needs either `expected`, a value, or `raises`"),
    ({"tests": [{"call": "f", "expected": 1, "raises": "ValueError"}]}, "needs either `expected`"),
    ({"tests": [{"call": "f", "raises": "SystemExit"}]}, "has to be the name of a built-in exception"),
    ({"tests": [{"call": "f", "args": 1, "expected": 1}]}, "`args` is 1; it has to be a list"),
    ({"tests": [{"call": "f", "kwargs": [], "expected": 1}]}, "`kwargs` is .*; it has to be a mapping"),
    ({"tests": [{"call": "f", "arg": [1], "expected": 1}]}, r"has the unknown keys \['arg'\]; valid are call, args"),
    ({"tests": [{"call": "f", "args": ["x"], "expected": "1", "literals": True}]}, "'x' is not a Python literal"),
    ({"tests": [{"call": "f", "args": [1], "expected": "1", "literals": True}]}, "1 is not text"),
    ({"tests": [{"call": "f", "expected": 1, "weight": 0}]}, "`weight` is 0; it has to be a number above 0"),
    ({"tests": [{"call": "f", "expected": 1, "kind": 3}]}, "`kind` is 3; it has to be a word"),
    ({"tests": [{"call": "f", "args": [object()], "expected": 1}]}, "`args` holds an object of type object"),
    ({"tests": [{"call": "f", "expected": [min]}]}, "`expected` holds an object of type builtin_function_or_method"),
    ({"tests": [{"stdin": "1"}]}, "has no `stdout`"),
    ({"tests": [{"stdin": 1, "stdout": "1"}]}, "`stdin` is 1; it has to be text"),
    ({"tests": [{"stdout": "1"}, {"call": "f", "expected": 1}]}, "mixes tests"),
    ({"test": "def check(candidate): pass"}, "needs a column `entry_point`"),
    ({"test": "def check(candidate) pass", "entry_point": "f"}, "column `test` is not Python"),
    ({"test": "x = 1", "entry_point": 3}, "column `entry_point` is 3; the code reward needs text there"),
    ({"test_list": ["assert len([]) == 0"]}, "column `test_list` calls no function of the solution"),
    ({"test_list": ["assert f("]}, "column `test_list` is not Python"),
    ({"test_list": []}, "calls no function|is empty"),
]


@pytest.mark.parametrize(("columns", "message"), TESTS)
def test_tests_that_are_none_are_errors(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_suite(columns)


def test_what_no_answer_can_print_or_return_is_an_error(made: Make) -> None:
    judge = made(output_kb=1)
    assert of(judge, "print('x' * 1000)", tests=[{"stdout": "x" * 1000}]).reward == 1.0
    for test in ({"stdout": "ü" * 600}, {"call": "f", "expected": "x" * 1100}):
        with pytest.raises(RewardError, match=r"`tests` expects 1\d+ bytes, and `output_kb` allows 1 KiB"):
            of(judge, "x", tests=[test])


def test_programs_and_several_functions_come_after_a_prefix(made: Make) -> None:
    program = "n = int(input())\ndef root(x):\n    return math.isqrt(x)\nprint(root(n))"
    tests = [{"stdin": "9\n", "stdout": "3\n"}]
    assert of(made(), program, prefix="import math\n", tests=tests).reward == 1.0
    two = "def f(x):\n    return x\ndef g(x):\n    return math.floor(x)"
    asserts = ["assert f(1) == 1", "assert g(1.5) == 1"]
    assert of(made(), two, prefix="import math\n", test_list=asserts).reward == 1.0


def test_the_class_of_a_method_is_what_is_looked_for(made: Make) -> None:
    text = (
        "```python\nclass Adder:\n    def plus(self, n): return n + 1\n```\nFor example:\n"
        "```python\nprint(Adder().plus(1))\n```"
    )
    tests = [{"args": [1], "expected": 2}]
    assert judged(made(), None, text, entry_point="Adder.plus", tests=tests).reward == 1.0


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])\nexit()", "ok"),
        ("print(*(line[::-1] for line in open(0).read().split()), sep='\\r\\n', end='  \\n\\n')", "ok"),
        ("out = open(1, 'w')\nout.write(f'{input()[::-1]}\\n{input()[::-1]}')", "ok"),
        ("print(input()[::-1]); print(input()[::-1]); print()\nprint('x')", "wrong_answer"),
    ],
)
def test_programs_write_in_their_ways(made: Make, code: str, outcome: str) -> None:
    assert of(made(), code, tests=[{"stdin": "ab\ncd\n", "stdout": "ba\ndc\n"}]).outcomes == {"code": outcome}


def test_long_outputs_are_compared_whole(made: Make) -> None:
    tests = [{"stdin": "90000\n", "stdout": "\n".join(map(str, range(90000)))}]
    judge = made()
    assert of(judge, "for n in range(int(input())): print(n, '')", tests=tests).reward == 1.0
    assert of(judge, "for n in range(int(input())): print(n % 89999)", tests=tests).outcomes == {"code": "wrong_answer"}


def test_errors_of_tests_name_the_task(made: Make) -> None:
    with pytest.raises(
        RewardError, match="reward `code` failed on task `t1`: ValueError: test 1 of column `tests` has no `stdout`"
    ):
        of(made(), "x", tests=[{"stdin": "1"}])


JUDGES = """
import time
def any_order(given, output, expected): return sorted(output.split()) == sorted(expected.split())
def root(given, output, expected): return isinstance(output, float) and abs(output ** 2 - given["args"][0]) < 1e-6
def half(given, output, expected): return 0.5
def slow(given, output, expected): time.sleep(60)
def wrong(given, output, expected): return "yes"
VALUE = 3
"""


def test_a_judge_of_the_users_own(made: Make, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    names: dict[str, Any] = {"tests": [{"stdin": "", "stdout": "a b c"}]}
    roots: dict[str, Any] = {"tests": [{"call": "f", "args": [2], "expected": None}]}
    order, root = (made(judge=f"{tmp_path}/judges.py:{name}") for name in ("any_order", "root"))
    assert of(order, "print('c a b')", **names).reward == 1.0
    assert of(order, "print('c a')", **names).outcomes == {"code": "wrong_answer"}
    assert of(root, "def f(x): return -x ** 0.5", **roots).reward == 1.0
    assert of(root, "def f(x): return x", **roots).reward == 0.0
    liar = "class L(float):\n    def __pow__(self, n): return 2\n    def __abs__(self): return 0\ndef f(x): return L(3)"
    assert of(root, liar, **roots).reward == 0.0
    half = of(made(judge=f"{tmp_path}/judges.py:half", credit="fraction"), "print()", **names)
    assert (half.reward, half.outcomes) == (0.5, {"code": "wrong_answer"})
    assert of(made(judge=f"{tmp_path}/judges.py:half"), "print()", **names).reward == 0.0
    slow = of(made(judge=f"{tmp_path}/judges.py:slow", time_limit_s=0.2), "print()", **names)
    assert slow.outcomes == {"code": "judge_failed"}
    with pytest.raises(RewardError, match="returned 'yes'; it has to return a bool or a number from 0 to 1"):
        of(made(judge=f"{tmp_path}/judges.py:wrong"), "print()", **names)
    with pytest.raises(ConfigError, match="is a int, not a function"):
        made(judge=f"{tmp_path}/judges.py:VALUE")


def test_a_judge_is_looked_up_beside_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    run = (
        "model: {new: {hidden_size: 32}}\ntaskset: {path: x.jsonl}\nrewards: [{name: code, judge: 'judges.py:half'}]\n"
    )
    (tmp_path / "run.yaml").write_text(run + "stages: [{name: one, steps: 1, algorithm: {name: grpo}}]\n")
    assert main(["check", str(tmp_path / "run.yaml"), "--no-data"]) == 0, capsys.readouterr().err
    (tmp_path / "judges.py").unlink()
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "judges.py does not exist" in capsys.readouterr().err


CHECKER = """
given, output, expected = (open(name + ".txt").read() for name in ("input", "output", "expected"))
n, parts = int(given), [int(word) for word in output.split()]
print("ok" if sum(parts) == n and len(parts) == int(expected) else "wrong")
"""


def test_a_checker_program(made: Make) -> None:
    columns: dict[str, Any] = {"tests": [{"stdin": "10", "stdout": "3"}], "checker": CHECKER}
    for code, outcome in (
        ("print(1, 2, 7)", "ok"),
        ("print(1, 9)", "wrong_answer"),
        ("print('ok')", "judge_failed"),
        ("print(' ok')\nprint(1.0)", "judge_failed"),
    ):
        found = of(made(), code, **columns)
        assert (found.outcomes, found.reward) == ({"code": outcome}, float(outcome == "ok"))
    returned: dict[str, Any] = {"tests": [{"call": "f", "args": [3], "expected": [1]}]}
    checker = (
        "import ast\nread = lambda name: ast.literal_eval(open(name).read())\n"
        "print(float(read('output.txt') == read('input.txt')['args']))"
    )
    assert of(made(), "def f(x): return [x]", checker=checker, **returned).reward == 1.0
    assert of(made(), "def f(x): return [1]", checker=checker, **returned).reward == 0.0


def test_setup_that_fails_or_never_ends_is_the_tests_own_fault(made: Make) -> None:
    for setup in ("1 / 0", "while True: pass", "import os; os._exit(0)"):
        columns = {"test_list": ["assert f(1) == 1", "assert f(2) == 2"], "test_setup_code": setup}
        found = of(made(credit="fraction", time_limit_s=0.5), "def f(x): return x", **columns)
        assert (found.reward, found.outcomes) == (0.0, {"code": "test_error"})


def test_large_arguments_and_results(made: Make) -> None:
    test = "def check(candidate):\n    assert candidate(list(range(300_000))) == 299_999\n"
    assert of(made(), "def f(xs): return max(xs)", entry_point="f", test=test).reward == 1.0
    tests = [{"args": [list(range(100_000))], "expected": list(range(1, 100_001))}]
    assert of(made(), "def f(xs): return [x + 1 for x in xs]", entry_point="f", tests=tests).reward == 1.0


def test_a_judgement_that_comes_too_late_gives_its_turn_back() -> None:
    endless, right = "while True: pass", "def square(x): return x * x"
    config = CodeReward(name="code", time_limit_s=30.0, jobs=1)
    with build_reward_manager([config], RewardManagerConfig(deadline_s=0.5)) as judge:
        assert of(judge, endless, **SQUARES).outcomes == {"code": "late"}
        assert of(judge, endless, **CHECKED).outcomes == {"code": "late"}
    with build_reward_manager([config], RewardManagerConfig(deadline_s=20.0)) as judge:

        async def both() -> list[RewardResult]:
            late = asyncio.ensure_future(judge.score(task(None, **CHECKED), completion(endless)))
            await asyncio.sleep(0.3)
            late.cancel()
            return [await judge.score(task(None, **columns), completion(right)) for columns in (CHECKED, SQUARES)]

        assert [each.reward for each in asyncio.run(both())] == [1.0, 1.0]


def test_details_are_logged_and_do_not_count() -> None:
    class Fixed(Reward):
        async def score(self, task: Task, completion: Completion) -> Score:
            return Score(0.5, details={"hidden": 0.25})

    class Together(Reward):
        scope = "group"

        async def score_group(self, task: Any, completions: Any, judged: Any) -> list[Score]:
            return [Score(0.1, details={"rank": 2.0}) for _ in completions]

    rewards = {"one": Fixed(weight=2.0), "all": Together()}
    with RewardManager(rewards, RewardManagerConfig(), RewardResources()) as judge:
        (found,) = asyncio.run(judge.score_group(task(1), [completion("a")]))
    assert found.reward == pytest.approx(1.1)
    assert found.parts == {"one": 0.5, "all": 0.1}
    assert found.details == {"one/hidden": 0.25, "all/rank": 2.0}
    gate = Fixed(gate=GateConfig(at_least=1.0, otherwise=-1.0))
    with RewardManager({"one": gate}, RewardManagerConfig(), RewardResources()) as judge:
        found = asyncio.run(judge.score(task(1), completion("a")))
    assert (found.reward, found.details) == (-1.0, {"one/hidden": 0.25})


RUN = """\
model: {new: {hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, context: 64, tokenizer: {kind: char}}}
taskset: {path: tasks.jsonl}
rewards: [{name: code, credit: fraction}]
rollout: {batch: 2, group_size: 2, max_new_tokens: 4}
stages: [{name: rl, steps: 1, algorithm: {name: grpo}}]
"""


def test_a_run_is_judged_by_code_and_logs_its_details(tmp_path: Path) -> None:
    row = {"prompt": "return", "prefix": "def square(x):\n    return 4 if x == 2 else", "entry_point": "square"}
    (tmp_path / "tasks.jsonl").write_text(2 * (json.dumps(row | {"tests": SQUARES["tests"][:2]}) + "\n"))
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/code"] == pytest.approx((metrics["reward/code/visible"] + metrics["reward/code/hidden"]) / 2)
    assert metrics["judged"] == 4


def test_packages_have_to_be_allowed(made: Make) -> None:
    tests = [{"call": "f", "args": [], "expected": 6.0}, {"call": "f", "args": [], "expected": 6}]
    code = "import numpy as np\ndef f(): return np.array([1.0, 2.0, 3.0]).sum()"
    assert of(made(), code, tests=tests).outcomes == {"code": "runtime_error"}
    assert of(made(packages=["numpy"], memory_mb=2048), code, tests=tests).reward == 1.0
    with pytest.raises(Exception, match="package 'no_such_package' cannot be allowed in the sandbox"):
        made(packages=["no_such_package"])


def test_a_prefix_is_continued_or_defined_again(made: Make) -> None:
    columns: dict[str, Any] = CHECKED | {"prefix": 'def square(x):\n    """x times x"""\n'}
    assert judged(made(), None, "    return x * x\n", **columns).reward == 1.0
    assert judged(made(), None, "    return x * x\n\nprint(undefined)\n", **columns).reward == 1.0
    assert of(made(), "def square(x):\n    return x * x", **columns).reward == 1.0
    assert of(made(), "    return x * x", **columns).reward == 1.0
    assert judged(made(), None, "    return x\n", **columns).outcomes == {"code": "wrong_answer"}
    assert judged(made(), None, "", **columns).outcomes == {"code": "no_code"}
