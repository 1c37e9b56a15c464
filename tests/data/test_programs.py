"""Tasksets from reasoning-gym generators and users' functions."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.errors import ConfigError, TasksetError


def generated(name: str, size: int = 4, seed: int = 0, options: dict[str, Any] | None = None, **keys: Any) -> Taskset:
    generator = {"name": name, "size": size, "seed": seed, "options": options or {}}
    return load_taskset(TasksetConfig.model_validate({"generator": generator, **keys}))


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "n_queens"])
def test_a_reward_can_score_the_tasks_of_a_generator(name: str, gym: Any) -> None:
    for task in pickle.loads(pickle.dumps(generated(name))).tasks:
        made_by = task.metadata["reasoning_gym"]
        scorer = gym.create_dataset(made_by["name"], **made_by["options"])
        assert scorer.score_answer(task.answer, task.metadata["entry"]) == 1
        assert scorer.score_answer("no", task.metadata["entry"]) < 1


def test_generators_without_a_gold_answer_and_with_options(gym: Any) -> None:
    assert [task.answer for task in generated("graph_color", 2).tasks] == [None, None]
    short = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    taskset = generated("chain_sum", options=short, template="{question}\nThink.", chat=True, limit=3)
    assert [task.id for task in taskset.tasks] == ["chain_sum:0", "chain_sum:1", "chain_sum:2"]
    assert all(task.metadata["entry"]["metadata"]["num_terms"] == 2 for task in taskset.tasks)
    prompt = taskset.tasks[0].prompt
    assert isinstance(prompt, list)
    assert prompt[0]["content"].endswith("=\nThink.")


def test_the_seed_chooses_the_tasks(gym: Any) -> None:
    assert generated("lcm", 3, seed=5) == generated("lcm", 3, seed=5)
    assert generated("lcm", 3, seed=5).tasks[0].prompt != generated("lcm", 3, seed=6).tasks[0].prompt


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("chain_sums", {}, r"generator.name: reasoning-gym has no chain_sums; did you mean chain_sum\?"),
        ("zzzz", {}, "reasoning-gym has no zzzz; there are ab, "),
        ("chain_sum", {"options": {"terms": 3}}, "generator.options: chain_sum refuses them: TypeError: .*terms"),
        ("chain_sum", {"options": {"min_terms": -1}}, "generator.options: chain_sum refuses them: AssertionError"),
        ("chain_sum", {"options": {"size": 3}}, "generator.options: size is a key of taskset.generator"),
        ("chain_sum", {"preset": "gsm8k"}, "taskset.preset: a generator makes rows in its own layout"),
    ],
)
def test_wrong_generators_say_what_is_wrong(name: str, keys: dict[str, Any], message: str, gym: Any) -> None:
    with pytest.raises(TasksetError, match=message):
        generated(name, **keys)


def test_without_reasoning_gym_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TasksetError, match=r"pip install 'rollmill\[reasoning\]'"):
        generated("chain_sum")


CODE = """
def rows(size=2, start=0):
    for number in range(start, start + size):
        yield {"prompt": f"{number}?", "answer": number}

def mixed():
    return [{"prompt": "a"}, "b", {3: "c"}, {"prompt": "a", "id": 1}]

def text():
    return "rows"

def one():
    return {"prompt": "a"}

def late():
    yield {"prompt": "a"}
    raise KeyError("lost")

def early():
    raise OSError("no disk")

number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "my_rows.py"
    path.write_text(CODE)
    return str(path)


def made(spec: str, **keys: Any) -> Taskset:
    return load_taskset(TasksetConfig.model_validate({"function": spec, **keys}))


def test_a_function_yields_rows_and_takes_options(code: str) -> None:
    taskset = made(f"{code}:rows", options={"size": 3, "start": 7})
    assert taskset.name == "rows"
    assert [(task.id, task.prompt, task.answer) for task in taskset.tasks] == [
        ("rows:0", "7?", 7),
        ("rows:1", "8?", 8),
        ("rows:2", "9?", 9),
    ]
    endless = made(f"{code}:rows", options={"size": 10**12}, limit=2)
    assert len(endless.tasks) == 2


def test_rows_of_a_function_can_be_bad(code: str) -> None:
    taskset = made(f"{code}:mixed", on_bad_row="skip")
    assert [task.id for task in taskset.tasks] == ["mixed:0", "mixed:3"]
    assert [str(row) for row in taskset.rejected] == [
        f"{code}:mixed: row 1: expected an object, found str",
        f"{code}:mixed: row 2: column names must be text, found 3",
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", {}, r":text returned a str; return or yield rows"),
        ("one", {}, r":one returned a dict; return or yield rows"),
        ("late", {}, r":late raised KeyError: 'lost' at row 1 \(.*my_rows.py:17\)"),
        ("early", {}, r":early raised OSError: no disk \(.*my_rows.py:20\)"),
        ("number", {}, ":number is a int, not a function"),
        ("rows", {"sizes": 3}, r":rows raised TypeError: .*sizes"),
        ("rows", {"size": 0}, r"taskset rows is empty: .*my_rows.py:rows has no rows"),
    ],
)
def test_wrong_functions_say_what_is_wrong(code: str, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        made(f"{code}:{name}", options=options)


def test_a_function_that_does_not_exist(code: str) -> None:
    with pytest.raises(ConfigError, match="did you mean `rows`"):
        made(f"{code}:row")


def test_ids_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n{"prompt": "c", "id": 2}\n')
    config = TasksetConfig.model_validate({"path": path, "fields": {"id": "id"}, "on_bad_row": "skip"})
    taskset = load_taskset(config)
    assert [task.id for task in taskset.tasks] == ["1", "2"]
    assert [str(row) for row in taskset.rejected] == [f"{path}:2: the id 1 is already used by {path}:1"]
