"""Runs from Python: what a script holds becomes a run file, which trains like any other."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.api_runs import MODEL, ROWS, SMALL, few_letters, weights

import rollmill
from rollmill.api.algorithms import algorithm_classes
from rollmill.config.algorithms import known_algorithms
from rollmill.errors import ConfigError
from rollmill.user_code import import_object, store_object


def test_importing_rollmill_is_quick() -> None:
    text = (
        "import rollmill, sys; print('torch' in sys.modules, 'pydantic' in sys.modules, 'cloudpickle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_there_is_a_class_per_algorithm() -> None:
    for name, section in known_algorithms().items():
        if section.__module__.startswith("rollmill."):
            assert getattr(rollmill, section.__name__).algorithm == name
    assert set(algorithm_classes()) < set(dir(rollmill))
    with pytest.raises(AttributeError, match="GROP"):
        _ = rollmill.GROP  # type: ignore[attr-defined]


def test_signatures_are_up_to_date() -> None:
    script = Path(__file__).parents[2] / "docs" / "python_api.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_settings_go_where_the_run_file_has_them(tmp_path: Path) -> None:
    run = rollmill.GRPO(**SMALL, rewards=["exact"], kl=0.1, steps=7, eval_dataset=ROWS[:3], out=tmp_path / "run")
    written = yaml.safe_load(run.to_yaml(tmp_path / "copy.yaml"))
    assert written["algorithm"] == {"name": "grpo", "kl": 0.1}
    assert (written["steps"], written["trainer"]["lr"], written["rollout"]["group_size"]) == (7, 1e-3, 4)
    rows = [json.loads(line) for line in Path(written["taskset"]["path"]).read_text().splitlines()]
    assert rows == ROWS
    assert run.config.evaluation is not None
    assert rollmill.TrainingRun(config=tmp_path / "copy.yaml", out=tmp_path / "again").loaded.resolved() == (
        run.loaded.resolved()
    )


def test_settings_of_an_algorithm_go_before_those_of_the_rollout(tmp_path: Path) -> None:
    run = rollmill.SFT(model=MODEL, dataset=[{"prompt": "a", "response": "b"}], batch=3, out=tmp_path / "run")
    assert yaml.safe_load(run.to_yaml())["algorithm"] == {"name": "sft", "batch": 3}


def test_a_run_file_is_the_base_of_what_is_given(tmp_path: Path) -> None:
    whole = rollmill.GRPO(**SMALL, rewards=["exact"], steps=9, out=tmp_path / "first")
    whole.to_yaml(tmp_path / "base.yaml")
    run = rollmill.RLOO(config=tmp_path / "base.yaml", lr=2e-3, out=tmp_path / "run")
    assert (run.config.algorithm.name, run.config.steps, run.config.trainer.lr) == ("rloo", 9, 2e-3)
    same = rollmill.RLOO(config=yaml.safe_load(whole.to_yaml()), lr=2e-3, out=tmp_path / "same")
    assert same.config.trainer == run.config.trainer


def test_errors_are_those_of_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no setting `group_sise`; did you mean `group_size`"):
        rollmill.GRPO(**SMALL, group_sise=4, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run.yaml:\d+: trainer.lr"):
        rollmill.GRPO(**(SMALL | {"lr": -1.0}), rewards=["exact"], out=tmp_path / "run")
    with pytest.raises(ConfigError, match="row 1 has a value that JSON cannot hold"):
        rollmill.GRPO(**(SMALL | {"dataset": [ROWS[0], {"prompt": object()}]}), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="steps: a run file cannot hold a set"):
        rollmill.GRPO(**SMALL, steps={1}, out=tmp_path / "run")


def test_directories_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = rollmill.GRPO(**SMALL, rewards=["exact"])
    second = rollmill.GRPO(**SMALL, rewards=["exact"])
    assert [first.folder, second.folder] == [tmp_path / "runs" / "grpo", tmp_path / "runs" / "grpo-2"]
    del first
    assert rollmill.GRPO(**SMALL, rewards=["exact"]).folder == tmp_path / "runs" / "grpo"


def test_every_form_of_reward_and_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text("def mine(task, completion):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = import_module("users_rewards").mine

    class Length:
        def __init__(self, most: int) -> None:
            self.most = most

        def __call__(self, task: rollmill.Task, completion: rollmill.Completion) -> float:
            return float(len(completion.text) <= self.most)

    def rows() -> Any:
        yield from ROWS

    best = "7"
    rewards = [
        mine,
        lambda task, completion: float(best in completion.text),
        Length(3),
        {"function": Length(5), "weight": 0.5},
        "exact",
    ]
    run = rollmill.GRPO(**(SMALL | {"dataset": rows}), rewards=rewards, out=tmp_path / "run")
    functions = [each.function for each in run.config.rewards if each.name == "python"]
    assert functions[0] == f"{tmp_path / 'users_rewards.py'}:mine"
    assert [each.rpartition(":")[2] for each in functions[1:]] == ["reward_lambda", "Length", "Length"]
    assert run.config.rewards[3].weight == 0.5
    assert run.config.taskset is not None
    assert list(import_object(str(run.config.taskset.function))()) == ROWS


def test_stored_objects_load_in_another_process(tmp_path: Path) -> None:
    offset = 3
    spec = store_object(tmp_path, lambda value: value + offset, "shifted")
    assert store_object(tmp_path, lambda value: value + offset, "shifted").endswith(":shifted")
    assert import_object(spec)(4) == 7
    text = f"from rollmill.user_code import import_object; print(import_object({spec!r})(5))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "8\n"
    with pytest.raises(ConfigError, match="holds no `shifter`; did you mean `shifted`"):
        import_object(spec.replace(":shifted", ":shifter"))
    with pytest.raises(ConfigError, match="`lock` cannot be pickled"):
        store_object(tmp_path, __import__("threading").Lock(), "lock")


def test_a_run_trains_and_shows_its_results(tmp_path: Path) -> None:
    best = "7"
    reward = lambda task, completion: float(best in completion.text)  # noqa: E731
    run = rollmill.GRPO(**SMALL, rewards=[reward], steps=2, eval_dataset=ROWS[:2], out=tmp_path / "run").train()
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert run.summary["steps"] == 2
    assert run.report.is_file()
    assert len(run.experiences(step=1)) == 8
    assert (run.model_path / "model.safetensors").is_file()
    assert rollmill.TrainingRun.open(tmp_path / "run").metrics == run.metrics
    with pytest.raises(ConfigError, match="already holds a run"):
        run.train()


@pytest.mark.slow
def test_a_run_inside_an_event_loop_is_the_same(tmp_path: Path) -> None:
    async def cell(folder: Path) -> rollmill.TrainingRun:
        return rollmill.GRPO(**SMALL, rewards=[few_letters], steps=2, out=folder).train()

    inside = asyncio.run(cell(tmp_path / "inside"))
    outside = rollmill.GRPO(**SMALL, rewards=[few_letters], steps=2, out=tmp_path / "outside").train()
    assert weights(inside.model_path) == weights(outside.model_path)
