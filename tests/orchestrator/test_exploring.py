"""Explorers without a trainer fill a buffer, and a trainer that starts there later learns from it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run

from rollmill.buffer import ExperienceKind, open_run_store
from rollmill.cli import main
from rollmill.errors import ConfigError
from rollmill.launch import run
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView

RL: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "evaluation": None,
    "pipeline": [{"name": "group_variance"}],
    "steps": 2,
}
ALONE = ("--set", "mode=explore", "--set", "await_trainer=false")


def test_a_trainer_learns_later_from_what_was_explored_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tiny_run(tmp_path, **RL), tmp_path / "out"
    assert main(["run", str(path), *ALONE, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no trainer takes part (await_trainer: false)" in said
    command = said.rpartition("a trainer learns from them by: rollmill ")[2].split()
    store = open_run_store(out)
    groups = [group for _, group in store.read(ExperienceKind.ROLLOUT)]
    store.close()
    assert len(groups) == 8
    assert all(each.versions[each.action_mask].tolist() == [0] * each.action_tokens for each in groups[0].experiences)
    rewards = [[each.reward for each in group.experiences] for group in groups]
    assert all(len(set(each)) > 1 for each in rewards), "the pipeline drops the others"
    assert main(["run", str(path), *ALONE, "--out", str(out)]) == 2
    assert "holds a run, or groups of one" in capsys.readouterr().err

    assert main(command) == 0
    assert "8 groups in the buffer were rolled out without a trainer" in capsys.readouterr().out
    learned = [e.group for step in (1, 2) for e in load_experiences(out, step=step)]
    assert set(learned) == {group.id for group in groups}
    assert [row["step"] for row in read_metrics(out)] == [1, 2]


def test_a_run_that_would_not_find_the_groups_is_refused(tmp_path: Path) -> None:
    path, out = tiny_run(tmp_path, **RL | {"steps": 1, "pipeline": None}), tmp_path / "out"
    assert main(["run", str(path), *ALONE, "--out", str(out)]) == 0
    with pytest.raises(ConfigError, match="4 groups that were rolled out without a trainer, and this run's buffer is"):
        run(path, out=out)
    run(path, ["buffer.store=sql"], out=out, view=PlainView(io.StringIO()))
    assert all("-train-" in e.group for e in load_experiences(out, step=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"buffer": {"store": "memory"}}, "buffer.store: memory ends with the process"),
        (
            {"algorithm": {"name": "sft", "batch": 2}, "rewards": None, "rollout": None, "pipeline": None},
            "rolls nothing out",
        ),
        ({"stages": [{"name": "a", "steps": 1}, {"name": "b", "steps": 1}], "steps": None}, "there is one stage"),
    ],
)
def test_what_cannot_be_explored_alone(
    tmp_path: Path, changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_run(tmp_path, **RL | changes)
    assert main(["check", str(path), *ALONE]) == 2
    assert says in capsys.readouterr().err
