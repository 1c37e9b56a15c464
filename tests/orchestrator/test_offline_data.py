"""Feedback and demonstrations pass the pipeline before they are learned from, as rollouts do."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run

from rollmill.apps.studio.feedback import open_feedback
from rollmill.apps.studio.feedback.requests import DemonstrateRequest, PreferRequest
from rollmill.cli import main
from rollmill.errors import StoreError
from rollmill.launch import resume, run
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView
from rollmill.types import ExperienceSource

MINE = """
from collections import Counter

import rollmill
from rollmill.types import ExperienceSource


@rollmill.operator
class polite:
    def __init__(self, *, word: str = "0 "):
        self.word, self.seen = word, Counter()

    def __call__(self, batch):
        for each in batch.experiences:
            self.seen[each.source.value] += 1
            batch.note(f"{each.source.value} {self.seen[each.source.value]}")
            if self.word in each.response:
                batch.drop(each, "rude")

    def state_dict(self):
        return dict(self.seen)

    def load_state_dict(self, state):
        self.seen = Counter(state)
"""


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A run with feedback: answers of which every other one begins with 0, and comparisons with one that does."""
    (tmp_path / "mine.py").write_text(MINE)
    told = started(tmp_path, "told", buffer={"store": "sql"}, steps=1)
    common: dict[str, Any] = {"author": "ann", "prompt": "1+1="}
    answers = [DemonstrateRequest(**common, task=f"t{n}", response=f"{(0, 2)[n % 2]} #{n}") for n in range(6)]
    pairs = [PreferRequest(**common, task=f"p{n}", chosen=f"2 #{n}", rejected=f"{(0, 3)[n % 2]} #9") for n in range(4)]
    open_feedback(told).submit([*answers, *pairs])
    return told


def started(folder: Path, name: str, **changes: Any) -> Path:
    base = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "evaluation": None}
    run(tiny_run(folder, **base | changes), out=folder / name, view=PlainView(io.StringIO()))
    return folder / name


def mixing(told: Path, **operator: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": "mix"},
        "plugins": [str(told.parent / "mine.py")],
        "pipeline": [{"name": "polite", **operator}],
        "offline_data": {"sources": [str(told)]},
        "checkpoint": {"every": 1, "keep_last": 9},
        "steps": 3,
    }


def shown(out: Path, step: int) -> list[str]:
    return [e.response for e in load_experiences(out, step=step) if e.source is not ExperienceSource.ROLLOUT]


@pytest.mark.slow
def test_a_posted_answer_that_an_operator_drops_is_not_learned_from(told: Path) -> None:
    """Others take its place; a stateful operator goes on where a resumed run does."""
    out = started(told.parent, "out", **mixing(told))
    plain = started(told.parent, "plain", **mixing(told) | {"pipeline": None, "plugins": None})
    for step in (1, 2, 3):
        found = shown(out, step)
        assert len(found) == len(shown(plain, step)) > 0
        assert set(found) <= {"2 #1", "2 #3", "2 #5"}
    assert any(text[0] == "0" for step in (1, 2, 3) for text in shown(plain, step))
    rows = read_metrics(out)
    assert sum(row.get("pipeline/polite/rude", 0) for row in rows) > 0
    shutil.rmtree(out / "checkpoints/step-000003")
    shutil.rmtree(out / "checkpoints/step-000002")
    resume(out, view=PlainView(io.StringIO()))

    def counts(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key.startswith("pipeline/")}

    again = read_metrics(out)
    assert [counts(row) for row in again] == [counts(row) for row in rows]
    assert any(key.startswith("pipeline/polite/expert_") for key in counts(rows[-1]))


def test_an_operator_says_which_experiences_it_takes(told: Path) -> None:
    out = started(told.parent, "out", **mixing(told, sources=["usual"]))
    assert any(text[0] == "0" for step in (1, 2, 3) for text in shown(out, step))
    assert not [key for row in read_metrics(out) for key in row if key.startswith("pipeline/polite/expert_")]


@pytest.mark.parametrize(("kind", "learned"), [("dpo", {"2 #1", "2 #3", "3 #9"}), ("sft", {"2 #1", "2 #3"})])
def test_algorithms_without_rollouts_have_a_pipeline_too(told: Path, kind: str, learned: set[str]) -> None:
    offline = {"algorithm": {"name": kind, "batch": 2}, "rewards": None, "rollout": None, "taskset": None}
    model = {"path": str(told / "checkpoints/step-000001"), "new": None}
    changes = mixing(told) | offline | {"model": model}
    out = started(told.parent, "out", **changes)
    found = [set(shown(out, step)) for step in (1, 2, 3)]
    assert set.union(*found) >= learned
    assert not any(text[0] == "0" for texts in found for text in texts)
    with pytest.raises(StoreError, match=r"`polite` dropped .* rude"):
        started(told.parent, "none", **changes | {"pipeline": [{"name": "polite", "word": "#"}]})


def test_a_pipeline_that_nothing_passes_is_an_error_of_the_run_file(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = mixing(told) | {"algorithm": {"name": "sft", "batch": 2}, "rewards": None, "rollout": None}
    path = tiny_run(
        told.parent, stages=None, trainer=None, evaluation=None, **changes | {"pipeline": ["group_variance"]}
    )
    assert main(["check", str(path)]) == 2
    assert "pipeline: not honoured: algorithm `sft`" in capsys.readouterr().err
