"""The examples of the README, the command that it names, and the benchmark."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollmill_sandbox
from rollmill_sandbox import __main__ as command
from rollmill_sandbox import isolation_check, syscall_check
from rollmill_sandbox.attacks import ATTACKS, SMALL, Attack

HERE = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
DOUBLE = "Here it is:\n```python\nprint(2 * int(input()))\n```"


def run_example(number: int) -> dict[str, Any]:
    """The names that an example defines."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[number], f"example {number}", "exec"), names)
    return names


def test_the_examples_are_three() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.slow
def test_a_reward_of_trl() -> None:
    names = run_example(0)
    texts = [DOUBLE, DOUBLE, "print(4)", "```python\nwhile True: pass\n```", "no code"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"stdin": ["2", "3", "2", "2", "2"], "stdout": ["4", "7", "4", "4", "4"], "prompts": texts}
    with names["sandbox"]:
        assert asyncio.run(names["passes"](completions=completions, **columns)) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_reward_of_verl() -> None:
    names = run_example(1)
    with names["sandbox"]:
        tests = json.dumps([["2", "4"], ["5", "11"]])
        assert names["compute_score"]("mine", DOUBLE, tests, extra_info={}) == 0.5


def test_a_function_tested_from_outside() -> None:
    names = run_example(2)
    calls = {"square(7)": 49, "square(-2)": 5}
    with names["sandbox"]:
        assert asyncio.run(names["solves"]("def square(n): return n * n", calls)) == [True, False]
        assert asyncio.run(names["solves"]("def square(n):\n    while n: pass", calls)) == [False, False]


@pytest.mark.parametrize(("more", "code"), [([], 0), ([Attack("friendly", "print('BREACH')", limits=SMALL)], 1)])
def test_the_check(
    more: list[Attack], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(syscall_check, "NUMBERS", range(36, 40))
    monkeypatch.setattr(isolation_check, "ATTACKS", [*ATTACKS[:2], *more])
    assert command.main(["check", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"] is None) == bool(code)
    assert [each["backend"] for each in found["backends"]] == ["namespaces", "landlock", "plain"]
    assert all(each["through"] == [attack.name for attack in more] for each in found["backends"] if each["programs"])


@pytest.mark.slow
def test_the_benchmark_prints_ratios() -> None:
    speed = [sys.executable, str(HERE / "bench/sandbox_speed.py")]
    options = ["--programs", "3", "--rounds", "2", "--backends", "namespaces", "--peers", "python -I -S -c"]
    environment = {"PYTHONPATH": str(Path(rollmill_sandbox.__file__).parents[1])}
    done = subprocess.run([*speed, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["backend"] for each in found["cases"]] == ["namespaces"]
    assert all(each["ratio_min"] <= each["ratio"] <= each["ratio_max"] for each in found["cases"])
    assert all(each["execute_ms"] > 0 for each in found["sessions"].values())
