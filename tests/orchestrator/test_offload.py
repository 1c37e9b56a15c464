"""Runs whose components come and go: the same numbers, whole checkpoints, nothing left behind."""

from __future__ import annotations

import io
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, send
from support.tiny import outcome, tiny_run
from support.toys import toy_checkpoint

from rollmill.errors import ConfigError
from rollmill.launch import evaluate, resume, run
from rollmill.offload import OffloadManager
from rollmill.offload.plan import estimate_component_sizes
from rollmill.orchestrator.stages import Stage
from rollmill.trackers import read_metrics
from rollmill.trackers.run_views import PlainView

EVERYTHING: dict[str, Any] = {"optimizer": "disk", "cache": "destroyed"}
RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "steps": 4}
PPO = RL | {
    "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1, "refresh_every": 2}},
    "offload": EVERYTHING | {"reference": "disk", "critic": "disk", "critic_optimizer": "memory"},
}
CAST = RL | {"trainer": {"precision": "bf16"}, "offload": EVERYTHING | {"policy": "disk", "cast": "destroyed"}}
SFT = RL | {"algorithm": {"name": "sft", "batch": 8}, "offload": EVERYTHING}
SFT |= {"rollout": {"batch": None, "group_size": None}}
STALE = RL | {"max_staleness": 1, "algorithm": {"name": "grpo", "kl": 0.1}}
STALE |= {"offload": EVERYTHING | {"reference": "disk"}}
RANKS = PPO | {"trainer": {"lr": 1e-3, "ranks": 2}}


def started(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    run(tiny_run(folder, **changes), out=folder / "out", view=PlainView(io.StringIO()))
    return folder / "out"


def same(folder: Path) -> dict[str, Any]:
    """What a run leaves behind, but for what says how much memory it took."""
    found = outcome(folder)
    ours = ("memory/", "residency/")
    found["metrics"] = [{k: v for k, v in row.items() if not k.startswith(ours)} for row in found["metrics"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("changes", [PPO, CAST, SFT, STALE, RANKS], ids=["ppo", "cast", "sft", "stale", "ranks"])
def test_the_same_numbers_with_and_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    with_it = started(tmp_path / "with", **changes)
    without = started(tmp_path / "without", **changes | {"offload": "none"})
    assert same(with_it) == same(without)
    row = read_metrics(with_it)[2]
    assert row["memory/train"] > 0.01
    assert row["residency/optimizer/gb"] > 0
    assert row["seconds/move"] > 0
    assert "memory/train" not in read_metrics(without)[2]
    assert not any("offload" in path.name for path in with_it.iterdir())


@pytest.mark.slow
def test_a_run_with_several_stages_and_the_default_plan(tmp_path: Path) -> None:
    plain = started(tmp_path / "plain")
    found = started(tmp_path / "auto", offload={"budget_gb": 0.0003})
    assert same(found) == same(plain)


@pytest.mark.slow
def test_reward_models_leave_while_the_trainer_works(tmp_path: Path) -> None:
    taskset = {
        "function": "rollmill.quickstart.addition:rows",
        "options": {"size": 9},
        "fields": {"rejected": "answer"},
    }
    judged = started(
        tmp_path / "rm",
        **RL | {"algorithm": {"name": "reward_model", "batch": 4}, "steps": 1, "taskset": taskset},
        rollout=None,
        rewards=None,
        evaluation=None,
    )
    rewards = [{"name": "model", "path": str(judged / "checkpoints/step-000001/reward_model")}]
    stages = [{"name": name, "algorithm": {"name": "grpo"}, "steps": 2} for name in ("first", "second")]
    changes = {"stages": stages, "trainer": {"lr": 1e-3}, "rewards": rewards, "checkpoint": {"keep_best": False}}
    plan = EVERYTHING | {"rewards": "disk"}
    found = started(tmp_path / "with", **changes, offload=plan)
    assert same(found) == same(started(tmp_path / "without", **changes))
    assert read_metrics(found)[2]["residency/rewards/gb"] > 0
    assert read_metrics(found)[2]["reward/mean"] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"algorithm": {"name": "distill"}, "offload": {"teacher": "disk"}}, {"offload": {"optimizer": "disk"}}],
    ids=["distill", "lora"],
)
def test_teachers_and_adapters(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = toy_checkpoint(tmp_path / "model", "qwen3")
    lora = {"lora": {"rank": 2}} if "algorithm" not in changes else {}
    if not lora:
        changes = changes | {"algorithm": {"name": "distill", "teacher": str(folder)}}
    changes = RL | {"model": {"path": str(folder), "new": None, **lora}, "steps": 2, "evaluation": None} | changes
    changes |= {"rollout": {"max_new_tokens": 8}, "rewards": [{"name": "format", "pattern": ".*[a-m].*"}]}
    found = started(tmp_path / "with", **changes)
    assert same(found) == same(started(tmp_path / "without", **changes | {"offload": "none"}))
    assert any(key.startswith("residency/") for key in read_metrics(found)[1])


@pytest.mark.parametrize("changes", [PPO, CAST, RL | {"offload": "auto"}], ids=["ppo", "cast", "auto"])
def test_sizes_are_known_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    found: list[tuple[dict[str, int], dict[str, int]]] = []
    enter = OffloadManager.enter

    def entered(self: OffloadManager, phase: Any) -> bool:
        moved = enter(self, phase)
        if phase == "rollout":
            [stage] = stages
            sizes = estimate_component_sizes(stage.config, stage.policy, "bf16" if changes is CAST else "fp32")
            now = {each.name: each.bytes() for each in self._components}
            places = self.plan.places[phase]
            found.append(
                (
                    {name: size for name, size in now.items() if places[name] == "device" and name != "cache"},
                    {name: sizes[name] for name in now if places[name] == "device" and name != "cache"},
                )
            )
        return moved

    stages: list[Stage] = []
    begin = Stage.begin
    monkeypatch.setattr(Stage, "begin", lambda self, stores: (stages.append(self), begin(self, stores))[1])
    monkeypatch.setattr(OffloadManager, "enter", entered)
    started(tmp_path, **changes | {"evaluation": None})
    assert len(found) == 4
    for now, predicted in found[1:]:
        assert now == predicted
        assert now


@pytest.mark.slow
def test_resume_goes_on_from_a_checkpoint_that_was_written_while_things_were_away(tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", **PPO)
    shutil.copytree(whole, tmp_path / "cut")
    for path in (tmp_path / "cut/checkpoints").glob("step-*"):
        if path.name != "step-000002":
            shutil.rmtree(path)
    resume(tmp_path / "cut", view=PlainView(io.StringIO()))
    assert same(tmp_path / "cut") | {"checkpoints": None} == same(whole) | {"checkpoints": None}
    found = evaluate(whole, 2)
    assert found["eval/greedy"] == next(r["eval/greedy"] for r in read_metrics(whole) if "eval/greedy" in r)


@pytest.mark.slow
def test_an_interrupted_and_a_killed_run_leave_no_files_and_resume(server: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    changes = PPO | {"offload": PPO["offload"] | {"folder": "elsewhere"}, "steps": 24, "checkpoint": {"every": 2}}
    tiny_run(tmp_path, **changes)
    assert server.run("run", "run.yaml", "--out", "whole", folder=tmp_path).code == 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        out = f"out{code}"
        server.start("run", "run.yaml", "--out", out, folder=tmp_path)
        assert server.reaches(lambda out=out: (tmp_path / out / "checkpoints/step-000002").exists())
        send(server.pid, number)
        assert server.wait().code == code
        assert list(folder.iterdir()) == []
        assert server.run("resume", out, folder=tmp_path).code == 0
        assert same(tmp_path / out) | {"checkpoints": None} == same(tmp_path / "whole") | {"checkpoints": None}
    assert list(folder.iterdir()) == []


def test_what_cannot_fit_is_said_before_the_run_starts(tmp_path: Path) -> None:
    small = {"name": "small", "algorithm": {"name": "sft", "batch": 4}, "steps": 2}
    large = {"name": "large", "algorithm": {"name": "ppo"}, "steps": 2}
    text = (
        r"^stage large: offload.budget_gb: the budget is 0.0002 GB, and the phase `train` needs 0.000288 GB on the "
        r"device \(gradients 4.12e-05, policy 4.11e-05, optimizer 8.22e-05, critic 4.12e-05, "
        r"critic optimizer 8.25e-05\)"
    )
    with pytest.raises(ConfigError, match=text):
        started(tmp_path, stages=[small, large], offload={"budget_gb": 0.0002})
    assert not (tmp_path / "out/checkpoints").exists()
    bf16 = {"trainer": {"precision": "bf16"}, "offload": {"budget_gb": 0.0001}}
    with pytest.raises(ConfigError, match="phase `train` needs"):
        started(tmp_path / "b", **RL | bf16)


def test_the_plan_is_announced(tmp_path: Path) -> None:
    said = io.StringIO()
    changes = RL | {"offload": {"optimizer": "disk"}, "steps": 1, "evaluation": None}
    run(tiny_run(tmp_path, **changes, monitor={"report": True}), out=tmp_path / "out", view=PlainView(said))
    assert "offload: optimizer on disk in rollout and inference; GB by phase: rollout" in said.getvalue()
    assert "Memory" in (tmp_path / "out/report.html").read_text()
