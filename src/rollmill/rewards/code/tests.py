"""Reads the tests of a task from its columns."""

from __future__ import annotations

import ast
import builtins
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rollmill.python_source import parse_literal, parse_python
from rollmill.rewards.code.extraction import complete_prefix
from rollmill.rewards.code.values import TooLargeError, decode, encode, foreign_type

VISIBLE, HIDDEN, GENERATED = "visible", "hidden", "generated"


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """A call, and its expected return value or the name of the exception that it raises.

    `arguments` are args and kwargs encoded as text; `size` is the length of the encoded `expected`.
    """

    call: str
    arguments: str
    args: list[Any]
    kwargs: dict[str, Any]
    expected: Any
    raises: str | None
    kind: str
    weight: float
    size: int


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """A program's stdin, and its expected stdout."""

    stdin: str
    stdout: str
    kind: str
    weight: float

    @property
    def size(self) -> int:
        """Bytes of the expected stdout."""
        return len(self.stdout.encode(errors="surrogatepass"))


@dataclass(frozen=True, slots=True)
class CheckTest:
    """Code that calls the functions `names` and raises if one is wrong. `setup` runs before it."""

    setup: str
    code: str
    names: tuple[str, ...]
    kind: str
    weight: float


Test = FunctionTest | ProgramTest | CheckTest


@dataclass(frozen=True, slots=True)
class Suite:
    """All tests of a task, of one type.

    `entry_point` is the name that the code must define (of a method: its class), if the task has one; `prefix` is the
    text that the code continues; `checker` is a program that compares outputs in place of the reward.
    """

    tests: list[Test]
    entry_point: str | None = None
    prefix: str = ""
    checker: str | None = None


def read_suite(metadata: Mapping[str, Any]) -> Suite | None:
    """Read the tests in a task's columns `tests`, `test` or `test_list`; None if it has none of them.

    Raises ValueError for invalid columns.
    """
    prefix, name = _text(metadata, "prefix") or "", _text(metadata, "entry_point")
    if (rows := _list(metadata, "tests")) is not None:
        tests: list[Test] = [_row(index, row, name) for index, row in enumerate(rows, 1)]
        if len({type(test) for test in tests}) > 1:
            raise ValueError("column `tests` mixes tests with `stdin` and tests with `args`; use one kind per task")
        named = name.split(".")[0] if name else _only_call(tests)
        return Suite(_checked(tests, "tests"), named, prefix, _text(metadata, "checker"))
    if (code := _text(metadata, "test")) is not None:
        if name is None:
            raise ValueError("column `test` needs a column `entry_point` with the name of the function that it checks")
        _parsed(code, "test")
        _parsed(complete_prefix(prefix), "prefix")
        return Suite(
            [CheckTest(complete_prefix(prefix), f"{code}\n\ncheck({name})\n", (name,), HIDDEN, 1.0)], name, prefix
        )
    if (asserts := _list(metadata, "test_list")) is not None:
        setup = f"{complete_prefix(prefix)}\n{_setup(metadata)}\n"
        names = _called(setup, "\n".join(map(str, asserts)), name)
        checks: list[Test] = [CheckTest(setup, f"{each}\n", names, HIDDEN, 1.0) for each in asserts]
        return Suite(_checked(checks, "test_list"), names[0] if len(names) == 1 else name, prefix)
    return None


def _checked(tests: list[Test], column: str) -> list[Test]:
    if not tests:
        raise ValueError(f"column `{column}` is empty; leave it out where there is nothing to test")
    return tests


def _row(index: int, row: Any, name: str | None) -> Test:
    where = f"test {index} of column `tests`"
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{where} is {row!r:.60}; it has to be a mapping with `args` and `expected`, or `stdin` and `stdout`"
        )
    row = {key: value for key, value in row.items() if value is not None or key == "expected"}
    kind, weight = row.get("kind", HIDDEN), row.get("weight", 1.0)
    if not isinstance(kind, str):
        raise ValueError(
            f"{where}: `kind` is {kind!r:.60}; it has to be a word such as {VISIBLE}, {HIDDEN}, {GENERATED}"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"{where}: `weight` is {weight!r:.60}; it has to be a number above 0")
    if "stdin" in row or "stdout" in row:
        _only(where, {key: value for key, value in row.items() if value is not None}, "stdin", "stdout")
        for key in ("stdin", "stdout"):
            if not isinstance(row.get(key, ""), str):
                raise ValueError(f"{where}: `{key}` is {row[key]!r:.60}; it has to be text")
        if "stdout" not in row:
            raise ValueError(f"{where} has no `stdout`; write what the program has to print")
        return ProgramTest(row.get("stdin", ""), row["stdout"], kind, float(weight))
    _only(where, row, "call", "args", "kwargs", "expected", "raises", "literals")
    return _function_test(where, row, name, kind, float(weight))


def _function_test(where: str, row: Mapping[str, Any], name: str | None, kind: str, weight: float) -> FunctionTest:
    call = row.get("call", name)
    if not isinstance(call, str) or not all(part.isidentifier() for part in call.split(".")):
        raise ValueError(f"{where}: no function to call; write its name as `call`, or in a column `entry_point`")
    if ("expected" in row) == ("raises" in row) and row.get("expected", 0) is not None:
        raise ValueError(f"{where} needs either `expected`, a value, or `raises`, the name of an exception")
    raises = row.get("raises")
    if raises is not None and not _is_exception(raises):
        raise ValueError(f"{where}: `raises` is {raises!r:.60}; it has to be the name of a built-in exception")
    args, kwargs, expected = row.get("args", []), row.get("kwargs", {}), row.get("expected")
    if not isinstance(args, list | tuple):
        raise ValueError(f"{where}: `args` is {args!r:.60}; it has to be a list, also for a single argument")
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"{where}: `kwargs` is {kwargs!r:.60}; it has to be a mapping of names to values")
    args, kwargs = list(args), dict(kwargs)
    if row.get("literals", False):
        args = [_literal(where, each) for each in args]
        kwargs = {key: _literal(where, each) for key, each in kwargs.items()}
        expected = _literal(where, expected) if raises is None else None
    arguments = _text_of(_encoded(where, "args", [args, kwargs]))
    tree = _encoded(where, "expected", expected)
    return FunctionTest(call, arguments, args, kwargs, decode(tree), raises, kind, weight, len(_text_of(tree)))


def _encoded(where: str, key: str, value: Any) -> Any:
    try:
        tree = encode(value)
    except TooLargeError as error:
        raise ValueError(f"{where}: `{key}` is too large: {error}") from None
    if (kind := foreign_type(tree)) is not None:
        raise ValueError(f"{where}: `{key}` holds an object of type {kind}; only built-in values can be tested")
    return tree


def _text_of(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


def _only(where: str, row: Mapping[str, Any], *known: str) -> None:
    if unknown := [key for key in row if key not in (*known, "kind", "weight")]:
        raise ValueError(f"{where} has the unknown keys {unknown}; valid are {', '.join(known)}, kind and weight")


def _literal(where: str, text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {text!r:.60} is not text; with `literals` every value is a Python literal in text")
    try:
        return parse_literal(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{where}: {text!r:.60} is not a Python literal ({error})") from None


def _is_exception(name: Any) -> bool:
    found = getattr(builtins, name, None) if isinstance(name, str) else None
    return isinstance(found, type) and issubclass(found, Exception)


def _only_call(tests: list[Test]) -> str | None:
    calls = {test.call.split(".")[0] for test in tests if isinstance(test, FunctionTest)}
    return calls.pop() if len(calls) == 1 else None


def _text(metadata: Mapping[str, Any], column: str) -> str | None:
    found = metadata.get(column)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"column `{column}` is {found!r:.60}; the code reward needs text there")
    return found or None


def _list(metadata: Mapping[str, Any], column: str) -> list[Any] | None:
    """Return a column that is a list, or the JSON text of one, as in tables without nested columns."""
    found = metadata.get(column)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise ValueError(f"column `{column}` is text that is not JSON: {error}") from None
    if found is not None and not isinstance(found, list | tuple):
        raise ValueError(f"column `{column}` is {found!r:.60}; the code reward needs a list of tests there")
    return None if found is None else list(found)


def _setup(metadata: Mapping[str, Any]) -> str:
    """Return the test's imports and setup code in MBPP's rows."""
    imports = "\n".join(map(str, _list(metadata, "test_imports") or []))
    return f"{imports}\n{_text(metadata, 'test_setup_code') or ''}"


def _called(setup: str, asserts: str, name: str | None) -> tuple[str, ...]:
    """Return the functions that assertions call and that nothing before them defines."""
    loads: dict[str, None] = {} if name is None else {name: None}
    known = {node.id for node in _names(_parsed(setup, "test_setup_code")) if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(_parsed(setup, "test_setup_code")):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(each.asname or each.name).split(".")[0] for each in node.names}
    called = {node.func.id for node in ast.walk(_parsed(asserts, "test_list")) if _calls_a_name(node)}  # type: ignore[attr-defined]
    loads |= dict.fromkeys(sorted(called - known - set(vars(builtins))))
    if not loads:
        raise ValueError("column `test_list` calls no function of the solution")
    return tuple(loads)


def _calls_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _names(tree: ast.Module) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _parsed(code: str, column: str) -> ast.Module:
    try:
        return parse_python(code)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"column `{column}` is not Python: {error}") from None


# Outcomes of tests, and the credit they earn.

OK: Final = "ok"
NO_CODE, TOO_LONG, COMPILE_ERROR, RUNTIME_ERROR = "no_code", "too_long", "compile_error", "runtime_error"
WRONG_ANSWER, TIMEOUT, MEMORY, OUTPUT = "wrong_answer", "timeout", "memory", "output"
TEST_ERROR, JUDGE_FAILED = "test_error", "judge_failed"
OUTCOMES: Final = {
    "ok": OK,
    "error": RUNTIME_ERROR,
    "killed": RUNTIME_ERROR,
    "ended": RUNTIME_ERROR,
    "timeout": TIMEOUT,
    "memory": MEMORY,
    "output": OUTPUT,
}
"""Outcome of the sandbox -> outcome of a test."""
FATAL_OUTCOMES: Final = frozenset((COMPILE_ERROR, TIMEOUT, MEMORY))
"""After one of these with `credit: all` the other tests are skipped: they cost as much and change nothing."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test. `credit` is from 0 to 1; between them only with a user's judge."""

    __test__ = False  # not for pytest

    kind: str
    weight: float
    outcome: str
    credit: float = 0.0


@dataclass(slots=True)
class TimeBudget:
    """The time for all tests of a completion, in seconds, counted from its construction."""

    total_s: float
    since: float = field(default_factory=time.monotonic)

    def left(self, most: float) -> float:
        """Return the remaining time, at most `most`; 0 if none is left."""
        return max(0.0, min(most, self.total_s - (time.monotonic() - self.since)))


def suite_outcome(results: Sequence[TestResult]) -> str:
    """Return the outcome of the first test that does not pass; "ok" if all do."""
    return next((result.outcome for result in results if result.outcome != OK), OK)


def suite_credit(results: Sequence[TestResult], credit: Literal["all", "fraction"]) -> float:
    """Return 1 for passing every test (`all`), or the weighted mean of the credits."""
    if credit == "all":
        return min(result.credit if result.outcome == OK else 0.0 for result in results)
    return mean_credit(results)


def mean_credit(results: Sequence[TestResult]) -> float:
    """Return the weighted mean of the credits; exactly 1 if all of them are."""
    if all(result.credit == 1.0 for result in results):
        return 1.0
    total = sum(result.weight for result in results)
    return sum(result.weight / total * result.credit for result in results)
