"""Which stores a run opens, and what it takes from them: its own, people's feedback, other runs', imports."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import GRPO, SFT, tiny_run

from rollmill.apps.studio.feedback import open_feedback
from rollmill.apps.studio.feedback.requests import DemonstrateRequest, PreferRequest
from rollmill.buffer import DATABASE_FILE, ExperienceKind, open_run_store
from rollmill.buffer.base import IMPORTED
from rollmill.cli import main
from rollmill.errors import ConfigError, PipelineError
from rollmill.launch import evaluate, resume, run
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView
from rollmill.types import Experience, ExperienceSource

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "evaluation": None}
NOTHING = """
import rollmill

@rollmill.operator
def nothing(batch):
    for experience in batch.experiences:
        batch.drop(experience, "all of it")
"""


def started(folder: Path, name: str = "out", **changes: Any) -> Path:
    run(tiny_run(folder, **(RL | changes)), out=folder / name, view=PlainView(io.StringIO()))
    return folder / name


def cut(out: Path, *, after: int, steps: int | None = None) -> None:
    """Make a finished run one that was killed after a step, of which it has a checkpoint; perhaps one of more steps."""
    if steps is not None:
        config = yaml.safe_load((out / "config.yaml").read_text())
        (out / "config.yaml").write_text(yaml.safe_dump(config | {"steps": steps}))
    for path in (out / "checkpoints").iterdir():
        if int(path.name.rpartition("-")[2]) > after:
            shutil.rmtree(path)


def fresh(out: Path, step: int) -> list[Experience]:
    return [e for e in load_experiences(out, step=step) if "replayed" not in e.info]


def import_again(out: Path, count: int, version: int) -> None:
    """Put copies of the run's first groups into its buffer, as `rollmill buffer import` does."""
    store = open_run_store(out, read_only=False)
    groups = [group for _, group in store.read(ExperienceKind.ROLLOUT)][:count]
    for group in groups:
        group.id, group.writer = f"theirs-{group.id}", IMPORTED
        for place, each in enumerate(group.experiences):
            aged = {"versions": each.versions.clip(max=version), "id": f"{group.id}/{place}", "group": group.id}
            group.experiences[place] = replace(each, **aged)
    store.put(groups)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_imported_groups_take_the_place_of_rollouts_within_the_bound(tmp_path: Path, max_staleness: int) -> None:
    options = {"store": "sql"} if max_staleness == 0 else {}
    changes = {"checkpoint": {"every": 1}, "max_staleness": max_staleness, "buffer": options}
    out = started(tmp_path, steps=3, **changes)
    cut(out, after=2, steps=8)
    import_again(out, 8, version=2)
    resume(out, view=PlainView(io.StringIO()))
    assert [{e.group[:6] for e in fresh(out, step)} for step in (3, 4)] == [{"theirs"}] * 2
    own = [e.group for step in (1, 2, 5, 6, 7, 8) for e in fresh(out, step)]
    assert len(set(own)) == 24
    rows = read_metrics(out)
    assert all(row["completions"] == 16 for row in rows)
    assert all(row["staleness/max"] <= max_staleness for row in rows if row["step"] not in (3, 4))
    submitted = {int(name.rpartition("-")[2]) for name in own}
    assert max(submitted) < 24 + 4 * max_staleness


@pytest.mark.slow
def test_imported_groups_that_are_too_old_stop_nobody(tmp_path: Path) -> None:
    out = started(tmp_path, steps=3, checkpoint={"every": 1}, buffer={"store": "sql", "max_age": 1})
    cut(out, after=2, steps=4)
    import_again(out, 8, version=0)
    resume(out, view=PlainView(io.StringIO()))
    assert [{e.group[:6] for e in fresh(out, step)} for step in (3, 4)] == [{"train-"}] * 2


def test_a_stage_replays_only_what_it_has_learned_from_itself(tmp_path: Path) -> None:
    first = GRPO | {"name": "first", "steps": 3}
    second = GRPO | {"name": "second", "steps": 4, "buffer": {"replay": {"groups": 4}}}
    out = started(tmp_path, algorithm=None, trainer=None, stages=[first | {"max_staleness": 1}, second])
    again = [[e.group for e in load_experiences(out, step=step) if "replayed" in e.info] for step in range(1, 8)]
    assert again[:4] == [[]] * 4, "the first step of a stage has nothing to replay"
    assert all(names and {name[:6] for name in names} == {"second"} for names in again[4:])


def test_a_run_started_again_where_one_failed_ignores_what_that_one_left(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(NOTHING)
    failing = {"plugins": [str(tmp_path / "nothing.py")], "pipeline": [{"name": "nothing"}], "buffer": {"store": "sql"}}
    with pytest.raises(PipelineError, match="nothing was left"):
        started(tmp_path, steps=2, rollout={"refills": 1}, **failing)
    assert (tmp_path / "out" / DATABASE_FILE).is_file()
    out = started(tmp_path, steps=2, algorithm={"name": "mix"})
    assert any(e.source is ExperienceSource.EXPERT for e in load_experiences(out, step=2))


@pytest.mark.slow
def test_feedback_is_found_as_soon_as_there_is_any(tmp_path: Path) -> None:
    """An empty database, as feedback makes it a moment before the first act, is no error; nor is none at all."""
    out = started(tmp_path, steps=2, algorithm={"name": "mix"}, checkpoint={"every": 1})
    (out / DATABASE_FILE).touch()
    cut(out, after=1, steps=4)
    resume(out, view=PlainView(io.StringIO()))
    shutil.rmtree(out / "checkpoints/step-000004")
    (out / DATABASE_FILE).unlink()
    open_feedback(out).submit([DemonstrateRequest(author="ann", task="mine", prompt="1+1=", response="2 #2")])
    cut(out, after=3, steps=4)
    resume(out, view=PlainView(io.StringIO()))
    assert "2 #2" in {e.response for e in load_experiences(out, step=4)}


def test_sources_are_opened_before_the_first_stage_runs(tmp_path: Path) -> None:
    other = started(tmp_path, "other", steps=1)
    told = SFT | {"name": "told", "offline_data": {"sources": [str(other)]}}
    with pytest.raises(ConfigError, match=f"{other} has no buffer.sqlite"):
        started(tmp_path, algorithm=None, trainer=None, rewards=None, rollout=None, stages=[SFT, told])
    assert not read_metrics(tmp_path / "out")


def test_evaluating_a_run_opens_no_buffer(tmp_path: Path) -> None:
    other = started(tmp_path, "other", steps=1, buffer={"store": "sql"})
    desk = open_feedback(other)
    desk.submit([DemonstrateRequest(author="ann", task="mine", prompt="1+1=", response="2 #2")])
    mixed = {"algorithm": {"name": "mix"}, "offline_data": {"sources": [str(other)]}, "max_staleness": 1}
    held_out = {"taskset": yaml.safe_load(tiny_run(tmp_path).read_text())["taskset"], "limit": 4, "at_start": False}
    out = started(tmp_path, steps=1, evaluation=held_out, **mixed)
    (other / DATABASE_FILE).write_bytes(b"no database")
    (out / DATABASE_FILE).write_bytes(b"no database, either")
    assert evaluate(out)["step"] == 1
    assert (out / DATABASE_FILE).read_bytes() == b"no database, either"


PAIRS: dict[str, Any] = {"algorithm": {"name": "dpo", "batch": 2}, "trainer": {"lr": 1e-3}, "steps": 3}


@pytest.mark.slow
def test_pairs_of_another_run_alone_are_enough_for_all_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No taskset; evaluated, resumed and checked."""
    first = started(tmp_path, "first", steps=3)
    prefer = [
        PreferRequest(author="ann", task=f"t{n}", prompt="1+1=", chosen=f"2 #{n}", rejected="3 #3") for n in range(5)
    ]
    open_feedback(first).submit(prefer)
    start = {"path": str(first / "checkpoints/step-000003"), "new": None}
    held_out = yaml.safe_load(tiny_run(tmp_path).read_text())["evaluation"]
    stages = [PAIRS | {"name": name, "offline_data": {"sources": [str(first)]}} for name in ("one", "two")]
    changes = {"algorithm": None, "taskset": None, "rollout": {"batch": None, "group_size": None}, "trainer": None}
    changes |= {"model": start, "stages": stages, "evaluation": held_out, "checkpoint": {"every": 1, "keep_last": 9}}
    out = started(tmp_path, **changes)
    capsys.readouterr()
    assert main(["check", str(out / "config.yaml")]) == 0
    assert evaluate(out)["step"] == 6
    for step in (1, 3, 5):
        copy = shutil.copytree(out, tmp_path / f"cut-{step}")
        (copy / "summary.json").unlink()
        cut(copy, after=step)
        resume(copy, view=PlainView(io.StringIO()))
        weights = [(each / "checkpoints/step-000006/model.safetensors").read_bytes() for each in (out, copy)]
        assert weights[0] == weights[1]
        batches = [[e.id for at in range(1, 7) for e in load_experiences(each, step=at)] for each in (out, copy)]
        assert batches[0] == batches[1]
