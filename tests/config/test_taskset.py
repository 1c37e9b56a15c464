"""Orders and pipelines in run files: shorthands, stages, and keys that nothing honours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.config.loader import LoadedRun, load_run
from rollmill.data.samplers.builtin.batch_sampler import CurriculumSampler, PrioritisedSampler
from rollmill.data.samplers.builtin.epochs import ShuffledSampler
from rollmill.errors import ConfigError

TASKSET = {"path": "tasks.jsonl"}
EVALUATION = {"evaluation": {"taskset": {"path": "held.jsonl"}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(taskset: dict[str, Any], *overrides: str, **keys: Any) -> LoadedRun:
    run = {"model": {"new": {}}, "taskset": TASKSET | taskset, "rewards": [{"name": "math"}], **keys}
    Path("run.yaml").write_text(yaml.safe_dump({key: run[key] for key in run if run[key]}, sort_keys=False))
    return load_run(Path("run.yaml"), overrides, require_files=False)


def sampler(*arguments: Any, **keys: Any) -> Any:
    return loaded(*arguments, **keys).stages[0].taskset.sampler


def test_an_order_is_a_name_or_a_section(folder: Path) -> None:
    assert sampler({}) == sampler({"sampler": "shuffled"}) == ShuffledSampler()
    assert sampler({"sampler": "prioritised"}) == PrioritisedSampler()
    assert sampler({"sampler": {"name": "prioritised", "floor": 0.3}}) == PrioritisedSampler(floor=0.3)
    assert sampler({"sampler": {"skip_uniform": 2}}) == ShuffledSampler(skip_uniform=2)
    assert sampler({"sampler": "curriculum"}, "taskset.sampler.warmup=3") == CurriculumSampler(warmup=3)


def test_stages_replace_or_refine_an_order(folder: Path) -> None:
    stages = [
        {"name": "one", "taskset": {"sampler": {"floor": 0.2}}},
        {"name": "two", "taskset": {"sampler": "curriculum"}},
        {"name": "three"},
    ]
    run = loaded({"sampler": {"name": "prioritised", "prior": 0.3}}, stages=stages)
    assert [stage.taskset.sampler for stage in run.stages] == [
        PrioritisedSampler(prior=0.3, floor=0.2),
        CurriculumSampler(),
        PrioritisedSampler(prior=0.3),
    ]
    Path("again.yaml").write_text(run.to_yaml())
    assert load_run(Path("again.yaml"), require_files=False).stages == run.stages


@pytest.mark.parametrize(
    ("taskset", "keys", "message"),
    [
        (
            {"sampler": "prioritized"},
            {},
            "taskset.sampler.name: `prioritized` is not known; did you mean `prioritised`?",
        ),
        (
            {"sampler": {"name": "posterior", "floor": 1}},
            {},
            "`floor` is honoured by sampler `prioritised`, not by `posterior",
        ),
        (
            {"sampler": {"name": "prioritised", "floor": 0}},
            {},
            "taskset.sampler.floor: expected more than 0, found `0`",
        ),
        ({"sampler": 3}, {}, "taskset.sampler: expected"),
        (
            {"sampler": {"name": "easy_to_hard", "prior": 0.3}},
            {},
            "taskset.sampler.prior: not honoured with by `difficulty`; it is with `success`",
        ),
        (
            {"sampler": {"name": "curriculum", "column": "level"}},
            {},
            "taskset.sampler.column: not honoured with by `success`; it is with `difficulty`",
        ),
        (
            {"sampler": "posterior"},
            {"algorithm": "sft"},
            "taskset.sampler: not honoured: algorithm `sft` learns from worked solutions and rolls nothing out, so no",
        ),
        (
            {},
            {"evaluation": {"taskset": {"path": "held.jsonl", "sampler": "sequential"}}},
            "evaluation.taskset.sampler: not honoured: every held-out task is evaluated each time; remove it",
        ),
    ],
)
def test_wrong_orders(taskset: dict[str, Any], keys: dict[str, Any], message: str, folder: Path) -> None:
    if keys.get("algorithm") == "sft":
        keys = {"algorithm": {"name": "sft"}, "rewards": []}
    with pytest.raises(ConfigError) as error:
        loaded(taskset, **keys)
    assert message in str(error.value)


def test_orders_by_difficulty_are_honoured_without_rollouts(folder: Path) -> None:
    run = loaded({"sampler": "easy_to_hard"}, algorithm={"name": "sft"}, rewards=[])
    assert run.stages[0].taskset.sampler.name == "easy_to_hard"
