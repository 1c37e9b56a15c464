"""Mixes: shares, ids, samplers of their own, and what may not be said beside them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Sampler, Taskset, build_sampler, load_taskset
from rollmill.errors import ConfigError, TasksetError


def jsonl(path: Path, count: int, **columns: Any) -> Path:
    rows = [{"prompt": f"{path.stem} {number}?", "answer": str(number), **columns} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[dict[str, Any]]:
    """Entries of a mix: 3 easy tasks of weight 3, and 5 hard ones."""
    easy, hard = jsonl(tmp_path / "a.jsonl", 3), jsonl(tmp_path / "b.jsonl", 5)
    return [{"name": "easy", "weight": 3, "path": easy}, {"name": "hard", "path": hard, "sampler": "sequential"}]


def mixed(entries: list[dict[str, Any]], **keys: Any) -> TasksetConfig:
    return TasksetConfig.model_validate({"mix": entries, **keys})


def sampler_of(config: TasksetConfig, seed: int = 0, batch: int = 4) -> Sampler:
    return build_sampler(load_taskset(config), config.sampler, seed, batch=batch)


def test_tasks_say_which_set_they_are_of(two: list[dict[str, Any]]) -> None:
    taskset = load_taskset(mixed(two))
    assert [(task.id, task.taskset) for task in taskset.tasks[2:4]] == [("easy/a:2", "easy"), ("hard/b:0", "hard")]
    assert taskset.name == "easy+hard"


def test_sets_are_drawn_by_weight_each_in_its_own_order(two: list[dict[str, Any]]) -> None:
    sampler = sampler_of(mixed(two))
    drawn = [sampler.next() for _ in range(40)]
    assert Counter(task.taskset for task in drawn) == {"easy": 30, "hard": 10}
    for end in range(1, 40):
        assert abs(sum(task.taskset == "easy" for task in drawn[:end]) - 0.75 * end) <= 1, "smooth"
    assert [task.id for task in drawn if task.taskset == "hard"] == [f"hard/b:{i}" for i in (0, 1, 2, 3, 4)] * 2
    easy = [task.id for task in drawn if task.taskset == "easy"]
    assert all(len(set(easy[epoch : epoch + 3])) == 3 for epoch in range(0, 30, 3))
    assert sampler.metrics() == {
        "tasks/easy/share": 0.75,
        "tasks/easy/epoch": 9,
        "tasks/hard/share": 0.25,
        "tasks/hard/epoch": 1,
    }
    assert sampler.epoch == 1
    assert not sampler.uses_success


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(1, 300))
def test_shares_are_never_far_off(weights: list[float], count: int) -> None:
    config = mixed([{"name": f"s{i}", "weight": w, "function": "m:f"} for i, w in enumerate(weights)])
    sampler = build_sampler(_made(config), config.sampler, 0, batch=1)
    drawn = Counter(sampler.next().taskset for _ in range(count))
    for number, weight in enumerate(weights):
        assert abs(drawn[f"s{number}"] - count * weight / sum(weights)) < len(weights)


def _made(config: TasksetConfig) -> Taskset:
    from rollmill.data.taskset import MixtureComponent
    from rollmill.types import Task

    tasks = [Task(f"{entry.name}/{i}", f"{entry.name} {i}", taskset=entry.name) for entry in config.mix for i in (0, 1)]
    return Taskset("mix", tasks, [], mixed=tuple(MixtureComponent(e.name, e.weight, e.sampler) for e in config.mix))


@given(st.integers(0, 9), st.integers(0, 30), st.integers(1, 20))
def test_a_state_goes_on_exactly(seed: int, done: int, more: int) -> None:
    entries: list[dict[str, Any]] = [
        {"name": "a", "weight": 2, "function": "m:f", "sampler": "prioritised"},
        {"name": "b", "weight": 1.5, "function": "m:f", "sampler": {"name": "posterior", "skip_uniform": 2}},
        {"name": "c", "weight": 0.7, "function": "m:f"},
    ]
    config = mixed(entries)
    sampler = build_sampler(_made(config), config.sampler, seed, batch=4)
    assert sampler.uses_success

    def play(sampler: Sampler, count: int) -> list[str]:
        drawn = []
        for number in range(count):
            task = sampler.next(number)
            sampler.observe(task.id, [1.0, float(number % 2)])
            drawn.append(task.id)
        return [*drawn, json.dumps(sampler.metrics())]

    play(sampler, done)
    state = sampler.state_dict()
    stored = json.dumps(state)
    expected = play(sampler, more)
    assert json.dumps(state) == stored
    resumed = build_sampler(_made(config), config.sampler, seed, batch=4)
    resumed.load_state_dict(json.loads(stored))
    assert play(resumed, more) == expected
    assert resumed.state_dict() == sampler.state_dict()


def test_success_is_noted_by_the_set_it_is_of() -> None:
    config = mixed([{"name": name, "function": "m:f", "sampler": "prioritised"} for name in ("a", "b")])
    sampler = build_sampler(_made(config), config.sampler, 0, batch=1)
    sampler.observe("b/1", [1.0])
    sampler.observe("c/1", [1.0])
    assert (sampler.metrics()["tasks/a/seen"], sampler.metrics()["tasks/b/seen"]) == (0.0, 0.5)


def test_sets_without_tasks_leave_their_share_to_the_others(two: list[dict[str, Any]]) -> None:
    taskset = load_taskset(mixed([*two, two[1] | {"name": "more"}]))
    fitting = taskset.with_tasks([task for task in taskset.tasks if task.taskset != "hard"], [])
    sampler = build_sampler(fitting, taskset.mixed[0].sampler, 0, batch=2)
    assert Counter(sampler.next().taskset for _ in range(8)) == {"easy": 6, "more": 2}


def test_other_weights_or_orders_are_refused(two: list[dict[str, Any]]) -> None:
    state = sampler_of(mixed(two)).state_dict()
    for change in ({"weight": 2}, {"sampler": "sequential"}):
        with pytest.raises(TasksetError, match="changed since the checkpoint"):
            sampler_of(mixed([two[0] | change, two[1]])).load_state_dict(state)


def test_a_pipeline_may_stand_in_an_entry_and_beside_the_mix(two: list[dict[str, Any]]) -> None:
    two[0]["pipeline"] = [{"name": "filter", "field": "answer", "at_least": 1}]
    taskset = load_taskset(mixed(two, pipeline=[{"name": "filter", "field": "answer", "at_most": 2}]))
    assert [task.id for task in taskset.tasks] == ["easy/a:1", "easy/a:2", "hard/b:0", "hard/b:1", "hard/b:2"]
    assert [str(report) for report in taskset.reports] == [
        "taskset easy: filter: 2 of 3 tasks kept, 1 dropped (answer too small 1)",
        "taskset easy+hard: filter: 5 of 7 tasks kept, 2 dropped (answer too great 2)",
    ]
    assert str(taskset.rejected[0]) == "task easy/a:0: filter: answer too small"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "x.jsonl"}, "give exactly one of path, generator, function, harbor and mix (found path and mix)"),
        ({"sampler": "sequential"}, "sampler is not honoured beside mix; write it in the entries of mix"),
        ({"template": "{q}"}, "template is not honoured beside mix"),
        (
            {"mix": [{"name": "a", "path": "a.jsonl"}, {"name": "a", "path": "b.jsonl"}]},
            "two entries of mix are called",
        ),
        (
            {"mix": [{"name": "a"}]},
            "run.yaml:5: taskset.mix.0: give exactly one of path, generator, function and harbor (found",
        ),
        (
            {"mix": [{"name": "a/b", "path": "a.jsonl"}]},
            "taskset.mix.0.name: expected letters, digits, `.`, `_` and `-`, found `a/b`",
        ),
        ({"mix": [{"name": "a", "path": "a.jsonl", "weight": 0}]}, "taskset.mix.0.weight: expected more than 0"),
        ({"mix": [{"name": "a", "path": "a.jsonl", "mix": []}]}, "taskset.mix.0.mix: unknown key"),
    ],
)
def test_wrong_mixes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    entry = {"name": "a", "path": "a.jsonl"}
    run = {"model": {"new": {}}, "taskset": {"mix": [entry], **change}, "rewards": [{"name": "math"}]}
    write(run, tmp_path / "run.yaml")
    with pytest.raises(ConfigError) as error:
        load_run(tmp_path / "run.yaml", require_files=False)
    assert message in str(error.value)


def held_out(two: list[dict[str, Any]], **evaluation: Any) -> dict[str, Any]:
    plain = [{key: value for key, value in entry.items() if key in ("name", "path")} for entry in two]
    run = {"model": {"new": {}}, "taskset": {"mix": two}, "rewards": [{"name": "math"}]}
    return run | {"evaluation": {"taskset": {"mix": plain}, **evaluation}}


def write(run: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(run, default=str)), sort_keys=False))
    return path


def test_weights_of_held_out_sets_are_not_honoured(two: list[dict[str, Any]], tmp_path: Path) -> None:
    run = held_out(two)
    run["evaluation"]["taskset"]["mix"][1]["weight"] = 2
    with pytest.raises(
        ConfigError, match=r"evaluation.taskset.mix.1.weight: not honoured: every held-out task is eval"
    ):
        load_run(write(run, tmp_path / "run.yaml"))
    with pytest.raises(ConfigError, match=r"evaluation.limit: the first tasks of a mix are those of its first set"):
        load_run(write(held_out(two, limit=3), tmp_path / "run.yaml"))


def test_a_resolved_mix_loads_to_itself(two: list[dict[str, Any]], tmp_path: Path) -> None:
    two[0] |= {"path": "a.jsonl"}  # beside the run file
    loaded = load_run(write(held_out(two), tmp_path / "run.yaml"))
    assert loaded.stages[0].taskset.mix[0].path == tmp_path / "a.jsonl"
    (tmp_path / "again.yaml").write_text(loaded.to_yaml())
    assert load_run(tmp_path / "again.yaml").stages == loaded.stages
    assert len(load_taskset(loaded.stages[0].evaluation.taskset).tasks) == 8  # type: ignore[union-attr]


def test_a_path_of_an_entry_has_to_exist(two: list[dict[str, Any]], tmp_path: Path) -> None:
    two[1]["path"] = "gone.jsonl"
    with pytest.raises(ConfigError, match=r"taskset.mix.1.path: gone.jsonl does not exist \(looked in"):
        load_run(write(held_out(two), tmp_path / "run.yaml"))


def test_check_names_the_sets(two: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(write(held_out(two), tmp_path / "run.yaml"))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 tasks (0 left out) from a mix; 3 x easy: " in shown
    assert "b.jsonl (sampler sequential)" in shown
