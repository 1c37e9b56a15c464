"""Runs whose tasks are mixed, prepared and ordered by success: what is seen decides, and resuming changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import TASKS, outcome, tiny_run

from rollmill.errors import TasksetError
from rollmill.launch import resume, run
from rollmill.trackers.run_views import PlainView

MIX: list[dict[str, Any]] = [
    {
        "name": "a",
        "weight": 2,
        **TASKS,
        "sampler": {"name": "prioritised", "skip_uniform": 1},
        "pipeline": ["clean", "deduplicate", {"name": "sample", "n": 12}],
    },
    {"name": "b", **TASKS, "options": {"size": 20, "seed": 3, "digits": 2}, "sampler": "posterior"},
    {
        "name": "c",
        **TASKS,
        "options": {"size": 9, "seed": 4, "digits": 2},
        "sampler": {"name": "curriculum", "warmup": 2},
    },
]


@pytest.fixture(scope="module", params=[0, 2], ids=["synchronous", "asynchronous"])
def finished(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run of eight steps with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    path = tiny_run(
        folder, rewards=[{"name": "format", "pattern": "[0-4 ].*"}], checkpoint={"every": 1, "keep_last": 99}
    )
    config = yaml.safe_load(path.read_text())
    config["taskset"] = {"mix": MIX, "pipeline": ["decontaminate"]}
    config["stages"][1]["max_staleness"] = request.param
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    run(path, out=folder / "out", view=PlainView(0))
    return folder / "out"


def cut(finished: Path, folder: Path, step: int) -> Path:
    """A copy of the run as it was after a step."""
    copied = shutil.copytree(finished, folder / "cut")
    for checkpoint in (copied / "checkpoints").iterdir():
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    (copied / "summary.json").unlink()
    return copied


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, pytest.param(11, marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_a_resumed_run_draws_the_same_tasks(finished: Path, step: int, tmp_path: Path) -> None:
    copied = cut(finished, tmp_path, step)
    resume(copied, view=PlainView(0))
    assert outcome(copied) == outcome(finished)


def test_success_reaches_the_sampler(finished: Path) -> None:
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert [last[f"tasks/{name}/share"] for name in "abc"] == [0.5, 0.25, 0.25]
    assert all(0 < last[f"tasks/{name}/seen"] <= 1 for name in "abc")
    assert all(0 < last[f"tasks/{name}/success"] < 1 for name in "abc")


def test_a_pipeline_that_gives_other_tasks_is_refused(finished: Path, tmp_path: Path) -> None:
    copied = cut(finished, tmp_path, 9)
    config = (copied / "config.yaml").read_text()
    assert config.count("n: 12") == 2  # one of each stage
    (copied / "config.yaml").write_text(config.replace("n: 12", "n: 11"))
    with pytest.raises(TasksetError, match=r"changed since the checkpoint \(size was 41, is 40\)"):
        resume(copied, view=PlainView(0))
