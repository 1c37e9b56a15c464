"""The README's rewards and examples, the interface for callers without an event loop, and what the library imports."""

from __future__ import annotations

import asyncio
import doctest
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollmill_grading
from rollmill_grading import MathGrader, SchoolGrader, SchoolQuestion, Verdict, answer_text

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_the_rewards_of_the_readme() -> None:
    trl: dict[str, Any] = {}
    verl: dict[str, Any] = {}
    exec(BLOCKS[0], trl)
    exec(BLOCKS[1], verl)
    texts, answers = [r"\boxed{\frac{1}{2}}", "The answer is 3.", r"\boxed{\sqrt{12}}"], ["0.5", "4", r"2\sqrt{3}"]
    expected = [1.0, 0.0, 1.0]
    assert trl["math_reward"](texts, answer=answers, prompts=["p"] * 3) == expected
    assert trl["math_reward"]([chat(text) for text in texts], answers) == expected
    found = [verl["compute_score"]("gsm8k", text, answer) for text, answer in zip(texts, answers, strict=True)]
    assert found == expected
    trl["grader"].close()
    verl["grader"].close()


def test_the_examples_of_the_readme() -> None:
    examples: dict[str, Any] = {}
    result = doctest.testfile(str(README), module_relative=False, globs=examples)
    assert (result.failed, result.attempted >= 11) == (0, True)


@pytest.mark.slow
def test_the_benchmark_of_the_readme(data_dir: Path) -> None:
    folder = README.parent
    environment = os.environ | {"PYTHONPATH": f"{folder}/src:{folder}/bench", "ROLLMILL_DATA": str(data_dir)}
    command = [sys.executable, "-m", "grading_bench", "--every", "60", "--count", "40", "--rounds", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["ratio"] > 0
    assert all(each["wrong_accepted"]["ours"] == 0 < each["right"] for each in result["labelled"].values())


def test_reasoning_is_no_answer() -> None:
    assert (
        answer_text("<think>5</think>6") == answer_text("5</think>6") == answer_text(chat("<think>5</think>6")) == "6"
    )
    assert answer_text("6") == "6"
    assert answer_text("<think>5") is None
    assert MathGrader().grade("<think>The answer is 5.", "5") == Verdict(0.0, "no_answer")
    assert SchoolGrader().grade("<think>The answer is 5.", SchoolQuestion("5")) == Verdict(0.0, "no_answer")


def test_a_running_event_loop_does_not_matter(math: MathGrader) -> None:
    async def inside() -> Verdict:
        return math.grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")

    assert asyncio.run(inside()).correct


def test_a_closed_grader_starts_again_and_a_copy_has_processes_of_its_own() -> None:
    with MathGrader() as grader:
        assert grader.grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}").correct
        [first] = grader.pool.pids()
        copy = pickle.loads(pickle.dumps(grader))
        with copy:
            assert copy.grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}").correct
            assert copy.pool.pids() != [first]
        grader.close()
        assert grader.grade(r"\boxed{\sqrt{12}}", r"2\sqrt{3}").correct
        assert grader.pool.pids() != [first]


def test_every_completion_has_its_reference(math: MathGrader) -> None:
    found = math.grade_all(["5", "6"], ["5", "5"], questions=["?", "?"], options=[None, ["1", "2"]])
    assert [each.score for each in found] == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        math.grade_all(["5", "6"], ["5"])


def test_the_library_imports_nothing_of_rollmill_and_no_torch() -> None:
    folder = Path(rollmill_grading.__file__).parent
    modules = [".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in folder.rglob("*.py")]
    program = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)}: importlib.import_module(name)\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'rollmill', 'torch', 'numpy', 'pint'})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout == "set()\n"
    assert rollmill_grading.MathGrader is MathGrader
    with pytest.raises(AttributeError, match="no attribute 'Grader'"):
        rollmill_grading.Grader  # noqa: B018
