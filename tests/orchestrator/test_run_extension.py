"""`rollmill resume RUN --set`: more steps for a finished or stopped run, and settings that a run may change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import GRPO as REPAIR
from support.tiny import SFT, metrics, ran, rolled_out

import rollmill
from rollmill import launch
from rollmill.cli import main
from rollmill.errors import ConfigError
from rollmill.orchestrator.extension import change_settings
from rollmill.trackers.event_log import CHANGED, read_events

GRPO: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "steps": 5, "evaluation": {"every": 2}}


def steps(run: Path) -> list[dict[str, Any]]:
    """Metrics of the training steps."""
    return [row for row in metrics(run) if "version" in row]


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics of the training steps, without times and evaluations."""
    return [{k: v for k, v in row.items() if "second" not in k and not k.startswith("eval/")} for row in steps(run)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps."""
    return ran(GRPO, tmp_path_factory.mktemp("extension"), "short", steps=3)


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy"))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_extended_run_makes_the_steps_of_a_longer_one(staleness: int, tmp_path: Path) -> None:
    longer = ran(GRPO, tmp_path, "longer", max_staleness=staleness)
    run = ran(GRPO, tmp_path, "short", steps=3, max_staleness=staleness)
    assert main(["resume", str(run), "--set", "steps=5"]) == 0
    assert [row["step"] for row in steps(run)] == [1, 2, 3, 4, 5]
    if staleness == 0:  # beside it, rollouts of a longer run begin before its end is known
        assert numbers(run) == numbers(longer)
        assert rolled_out(run) == rolled_out(longer)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["steps"] == 5
    [event] = read_events(run, CHANGED)
    assert (event["step"], event["changes"]) == (3, ["steps 3 -> 5"])


@pytest.mark.slow
def test_the_last_of_several_stages_is_extended_from_python(tmp_path: Path) -> None:
    run = ran({"stages": [SFT | {"steps": 1}, REPAIR | {"name": "more", "steps": 2}]}, tmp_path, "two", evaluation=None)
    opened = rollmill.resume(run, steps=3)
    assert opened.summary["steps"] == 4
    assert [row["stage"] for row in steps(run)] == ["warm", "more", "more", "more"]
    with pytest.raises(ConfigError, match="stage more has made 3 steps already"):
        rollmill.resume(run, steps=2)
    assert launch.resume(run)["steps"] == 4  # a finished run stays finished


@pytest.mark.slow
def test_a_run_that_stopped_early_goes_on_with_more_steps(tmp_path: Path) -> None:
    rule = {"metric": "eval/greedy", "patience": 1}
    run = ran(GRPO, tmp_path, "early", steps=9, early_stop=rule, evaluation={"every": 1, "limit": 2})
    ended = steps(run)[-1]["step"]
    assert ended < 9
    assert launch.resume(run)["steps"] == ended
    assert launch.resume(run, overrides=["steps=10", "early_stop=null"])["steps"] == 10


@pytest.mark.slow
def test_a_learning_rate_holds_from_its_step_on(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    launch.resume(run, overrides=["steps=4", "trainer.lr=0.0005"])
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert [row["lr"] for row in steps(run)] == pytest.approx([*[saved["trainer"]["lr"]] * 3, 5e-4])
    assert [(each["step"], each["lr"]) for each in saved["changes"]] == [(3, 5e-4)]


def test_what_would_make_a_run_inconsistent_is_refused(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    before = (run / "config.yaml").read_text()
    for override in ("seed=3", "rollout.batch=2", "algorithm.kl=0.1", "rewards.0.weight=2", "model.new.layers=2"):
        with pytest.raises(ConfigError, match=f"--set {override.partition('=')[0]}.*may change is steps, trainer.lr"):
            change_settings(run, [override])
    with pytest.raises(ConfigError, match="stage train has made 3 steps already; give more"):
        change_settings(run, ["steps=2"])
    with pytest.raises(ConfigError, match=r"trainer\.lr"):
        change_settings(run, ["trainer.lr=fast"])
    with pytest.raises(ConfigError, match="holds no run"):
        change_settings(tmp_path, ["steps=9"])
    assert (run / "config.yaml").read_text() == before
    assert read_events(run, CHANGED) == []
    assert change_settings(run, ["steps=3"]) == []
    assert change_settings(run, ["checkpoint.every=7", "monitor.report=true"]) == [
        "checkpoint.every 2 -> 7",
        "monitor.report false -> true",
    ]
