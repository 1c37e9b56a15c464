"""Small changes to code, and how they come into a process that has the code loaded."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from bench.mutation.mutants import Mutant, mutants
from bench.mutation.patching import install, live_objects, note_lines, replace_code

ROOT = Path(__file__).resolve().parents[2]


def changes(source: str) -> list[str]:
    return [mutant.change for mutant in mutants(ast.parse(source), source, "x.py")]


def loaded(source: str, file: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType("changed")
    module.__file__ = file
    vars(module).update(names)
    exec(compile(source, file, "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a is None", ["a is None -> a is not None"]),
        ("a - b", ["a - b -> a + b"]),
        ("-a", ["-a -> a"]),
        ("a and b", ["a and b -> a or b", "a and b -> b", "a and b -> a"]),
        ("a + 2", ["a + 2 -> a - 2", "2 -> 3", "2 -> 1"]),
        ("a * 0.5", ["a * 0.5 -> a / 0.5", "0.5 -> 1.5", "0.5 -> -0.5"]),
        ("a[0]", ["a[0] -> a", "a[0] -> a[-1]", "0 -> 1"]),
        ("a.detach()", ["a.detach() -> a"]),
        ("min(a, b)", ["min(a, b) -> max(a, b)", "min(a, b) -> a"]),
        ("a.clamp(min=b)", ["a.clamp(min=b) -> a", "a.clamp(min=b) -> a.clamp()", "a.clamp(min=b) -> a.clamp(max=b)"]),
        ("g(a, b)", ["g(a, b) -> a", "g(a, b) -> g(b, a)"]),
        (
            "g(low=a, high=b)",
            ["g(low=a, high=b) -> g(high=b)", "g(low=a, high=b) -> g(low=a)", "g(low=a, high=b) -> g(low=b, high=a)"],
        ),
        ("a if c else b", ["a if c else b -> a", "a if c else b -> b"]),
        ("[x for x in a if x]", ["if x -> if True"]),
        ("f'{a} is wrong'", []),
    ],
)
def test_what_an_expression_becomes(expression: str, expected: list[str]) -> None:
    found = changes(f"def f(a, b, c, g):\n    return {expression}\n")
    assert [each for each in found if not each.endswith("return None")] == expected


def test_names_and_attributes_that_are_taken_for_each_other() -> None:
    source = "def f(first, last, a):\n    return first.reward, a.clip_low + a.clip_high\n"
    assert {"first -> last", "a.clip_low -> a.clip_high", "a.clip_high -> a.clip_low"} <= set(changes(source))


def test_statements_are_dropped_where_the_function_can_do_without() -> None:
    source = '''
def f(a):
    """Text."""
    a = a + 1
    b = 2 * a
    b += 1
    g(b)
    if not b:
        raise ValueError(f"{b} is no number")
    assert b
    for each in b:
        a[each] = b
    return b
'''
    dropped = [each for each in changes(source) if each.endswith("-> pass")]
    assert dropped == [
        "a = a + 1 -> pass",
        "b += 1 -> pass",
        "g(b) -> pass",
        "raise ValueError(f'{b} is no number') -> pass",
        "a[each] = b -> pass",
    ]
    assert {"not b -> True", "not b -> False", "in b -> in ()", "b += 1 -> b -= 1"} <= set(changes(source))


def test_annotations_decorators_and_names_to_export_are_left_alone() -> None:
    source = """
from __future__ import annotations
__all__ = ["a"]
A = Literal["a", "b"]
@dataclass(frozen=True)
class B:
    c: Literal["x"] = 1
"""
    assert changes(source) == ["1 -> 2", "1 -> 0"]


SOURCE = """
TABLE = {"one": 1}

def plain(a, *, more=2):
    return a + more

class Thing:
    size = 3

    @property
    def double(self):
        return 2 * self.size

    @staticmethod
    def least(a, b):
        return min(a, b)

@cache
def kept(a):
    return a + 1
"""


@pytest.mark.parametrize(
    ("change", "look", "before", "after"),
    [
        ("a + more -> a - more", lambda m: m.plain(5), 7, 3),
        ("2 -> 3", lambda m: m.plain(5), 7, 8),
        ("3 -> 4", lambda m: m.Thing().double, 6, 8),
        ("2 * self.size -> 2 / self.size", lambda m: m.Thing().double, 6, 2 / 3),
        ("min(a, b) -> max(a, b)", lambda m: m.Thing.least(1, 2), 1, 2),
        ("a + 1 -> a - 1", lambda m: m.kept(1), 2, 0),
        ("'one' -> 'one?'", lambda m: list(m.TABLE), ["one"], ["one?"]),
    ],
)
def test_everyone_who_holds_a_function_or_a_table_sees_the_change(
    change: str, look: Callable[[Any], Any], before: object, after: object, tmp_path: Path
) -> None:
    file, tree = str(tmp_path / "changed.py"), ast.parse(SOURCE)
    module = loaded(SOURCE, file, cache=cache)
    held = types.SimpleNamespace(**{**vars(module), "plain": partial(module.plain)})
    assert look(held) == before
    chosen: Mutant = next(each for each in mutants(tree, SOURCE, "x.py") if each.change == change)
    install(chosen, tree, module, live_objects({file})[file])
    assert look(held) == look(module) == after


def test_the_lines_that_are_reached_are_noted(tmp_path: Path) -> None:
    source = "def f(a):\n    if a:\n        b = 1\n    else:\n        b = [\n            2\n        ]\n    return b\n"
    file, tree = str(tmp_path / "changed.py"), ast.parse(source)
    module = loaded(source, file)
    live = live_objects({file})[file]
    reached = note_lines(tree, module, live)
    assert (module.f(0), reached) == ([2], {2, 5, 8})
    reached.clear()
    assert (module.f(1), reached) == (1, {2, 3, 8})
    replace_code(tree, module, live)
    reached.clear()
    assert (module.f(1), reached) == (1, set())


@pytest.mark.slow
def test_the_pacing_rule_has_no_hole(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "mutation",
        "--module",
        "orchestrator/pacing.py",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["share"] == 1.0
    rows = json.loads((tmp_path / "mutation.json").read_text())["modules"]
    assert rows["src/rollmill/orchestrator/pacing.py"]["mutants"] > 10
