"""Checks of tasks: leaked answers, duplicates, overlap, length, solvability."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rollmill.apps.audit.findings import Finding, Severity
from rollmill.apps.audit.runner import AuditOptions, run_audit
from rollmill.apps.audit.tasks import (
    check_contamination,
    check_duplicates,
    check_leakage,
    check_prompt_length,
    check_solvability,
)
from rollmill.config.loader import load_taskset_run
from rollmill.config.taskset import TasksetConfig
from rollmill.data import load_taskset
from rollmill.types import Task


def plain_tasks(count: int = 60) -> list[Task]:
    """Sums with numbers of one and two digits, so that short answers stand in prompts by accident."""
    dice = random.Random(0)
    numbers = [[dice.randint(1, 30) for _ in range(6)] for _ in range(count)]
    names = ["Ann", "Bob", "Cid", "Dan", "Eve", "Flo", "Gus", "Hal", "Ida", "Jim"]
    prompts = [
        f"{dice.choice(names)} has {a} apples, {dice.choice(names)} {b} pears; {c}, {d}, {e} and {f} go. How many?"
        for a, b, c, d, e, f in numbers
    ]
    return [Task(str(n), prompt, answer=str(sum(numbers[n]) % 40)) for n, prompt in enumerate(prompts)]


def test_short_answers_stand_in_prompts_by_accident() -> None:
    tasks = plain_tasks()
    inside = sum(f" {task.answer} " in str(task.prompt) for task in tasks)
    assert inside > 3
    assert check_leakage(tasks).severity is Severity.OK


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (" (Solution: 51,730.)", "51730"),
        (" Hint: the answer is 7", "7"),
        (" #### 12", "12"),
        (" Think of Yellowstone Park.", "Yellowstone Park"),
        (" It is \\boxed{x+1}", "x+1"),
    ],
)
def test_answers_in_prompts_are_found(change: str, answer: str) -> None:
    tasks = plain_tasks()
    tasks[5] = Task("leaky", f"{tasks[5].prompt}{change}", answer=answer)
    found = check_leakage(tasks)
    assert found.severity is Severity.WARNING
    assert found.tasks == ["leaky"]


def test_many_leaks_are_a_problem_and_messages_of_the_system_are_looked_at() -> None:
    tasks = [
        Task(
            str(n),
            [{"role": "system", "content": f"Secret: {7001 + 13 * n}"}, {"role": "user", "content": "Say it."}],
            7001 + 13 * n,
        )
        for n in range(20)
    ]
    found = check_leakage(tasks)
    assert (found.severity, len(found.tasks)) == (Severity.PROBLEM, 20)


def test_worked_examples_and_options_are_no_leak() -> None:
    shots = "Question: 2+2? #### 4\n"
    assert (
        check_leakage([Task(str(n), f"{shots}What is {n} and 2?", str(n + 2)) for n in range(9)]).severity
        is Severity.OK
    )
    options = {"A": "Ottawa", "B": "Toronto"}
    choices = [Task(str(n), "Capital? A. Ottawa B. Toronto", "A", metadata={"options": options}) for n in range(9)]
    assert check_leakage(choices).severity is Severity.SKIPPED
    texts = [Task(str(n), "Capital? A. Ottawa B. Toronto", "Ottawa", metadata={"options": options}) for n in range(9)]
    assert check_leakage(texts).severity is Severity.SKIPPED


def test_duplicates() -> None:
    tasks = plain_tasks()
    assert check_duplicates(tasks[:1]).severity is Severity.OK
    same = [
        Task("a", "What is the capital of Canada today?", "Ottawa"),
        Task("b", "what is the capital  of Canada today?", "Ottawa"),
    ]
    found = check_duplicates([*same, Task("c", "Who wrote the play Hamlet?", "Shakespeare")])
    assert (found.severity, found.tasks) == (Severity.PROBLEM, ["b"])  # more than a fifth of the tasks
    other = Task("d", "What is the capital of Canada today?", "Toronto")
    many = [Task(f"n{n}", f"Question {'ab' * n} about {n * n}: which {n}?", str(n)) for n in range(30)]
    assert "another answer (d)" in check_duplicates([same[0], other, *many]).text


def test_contamination() -> None:
    tasks = plain_tasks()
    assert check_contamination(tasks, []).severity is Severity.SKIPPED
    assert (
        check_contamination(tasks[:30], [Task("x", "Something else that is asked of nobody", "1")]).severity
        is Severity.OK
    )
    found = check_contamination(tasks, [Task("x", str(tasks[3].prompt).upper(), "1")])
    assert found.severity is Severity.PROBLEM
    assert "3" in found.tasks


def test_prompts_that_do_not_fit() -> None:
    lengths = {"a": 10, "b": 90, "c": 130}
    assert check_prompt_length(lengths, 1000, 100).severity is Severity.OK
    assert check_prompt_length(lengths, 150, 40).tasks == ["c"]
    found = check_prompt_length(lengths, 120, 20)
    assert (found.severity, found.tasks) == (Severity.PROBLEM, ["c"])


def test_solvability() -> None:
    assert check_solvability({"a": 0.5, "b": 0.0, "c": 1.0}).severity is Severity.OK
    none = check_solvability({str(n): 0.0 for n in range(20)})
    assert none.severity is Severity.PROBLEM
    assert none.numbers["histogram"] == [20] + [0] * 9
    assert check_solvability({str(n): float(n > 0) or 0.3 for n in range(20)}).severity is Severity.WARNING


def real(data: Path, run: Path, reward: str, count: int, **taskset: str) -> dict[str, Finding]:
    run.write_text(json.dumps({"taskset": taskset | {"path": str(data)}, "rewards": [{"name": reward}]}))
    loaded = load_taskset_run(run)
    found = run_audit(loaded, loaded.stages[0], AuditOptions(tasks=count), lambda text: None)
    return {each.check: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "preset", "reward"),
    [
        pytest.param("gsm8k/train.jsonl", "gsm8k", "math", marks=pytest.mark.thorough),
        ("k12/cmath.jsonl", "cmath", "k12"),
        pytest.param("k12/gaokao_math_qa.jsonl", "gaokao_qa", "k12", marks=pytest.mark.thorough),
        pytest.param("k12/mmlu_stem.jsonl", "mmlu", "k12", marks=pytest.mark.thorough),
    ],
)
def test_real_tasks_and_the_rewards_made_for_them_have_no_problem(
    data_dir: Path, tmp_path: Path, file: str, preset: str, reward: str
) -> None:
    found = real(data_dir / file, tmp_path / "run.yaml", reward, 25, preset=preset)
    bad = {check: each.text for check, each in found.items() if each.severity is Severity.PROBLEM}
    assert bad == {}
    assert found["oracle"].severity is Severity.OK
    assert found["determinism"].severity is Severity.OK


def test_gsm8k_s_one_leak_and_its_duplicate(data_dir: Path) -> None:
    """A distance of 448 miles, and the answer 448; a question that is there twice but for the numbers."""
    taskset = TasksetConfig.model_validate({"path": data_dir / "gsm8k/train.jsonl", "preset": "gsm8k", "limit": 1500})
    found = check_leakage(load_taskset(taskset).tasks)
    assert (found.severity, found.tasks) == (Severity.WARNING, ["train:1231"])
