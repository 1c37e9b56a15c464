"""Tasks for Label Studio, and its annotations as acts."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.feedback_runs import END, TOKENIZER, completion, everything, groups_of, of_kind

from rollmill.apps.studio.feedback import FeedbackError, FeedbackService, open_feedback
from rollmill.apps.studio.feedback.label_studio import ImportResult, export_tasks, import_annotations
from rollmill.buffer import ExperienceKind
from rollmill.errors import ConfigError
from rollmill.trackers.rollout_log import RolloutLog


@pytest.fixture
def desk(made: Path, tmp_path: Path) -> Iterator[FeedbackService]:
    opened = open_feedback(shutil.copytree(made, tmp_path / "apples"))
    yield opened
    opened.acts._store.close()


def annotated(
    task: dict[str, Any], *results: dict[str, Any], id: int = 7, user: Any = 3, **about: Any
) -> dict[str, Any]:
    """A task as Label Studio's JSON export has it, with one annotation."""
    annotation = {
        "id": id,
        "completed_by": user,
        "result": [{"id": f"r{n}", "origin": "manual", **one} for n, one in enumerate(results)],
        "was_cancelled": False,
        "ground_truth": False,
        "created_at": "2026-03-09T22:16:08.728353Z",
        "updated_at": "2026-03-09T22:16:09Z",
        "lead_time": 4.288,
        "task": 1,
        "project": 5,
    }
    extra = {"id": 1, "created_at": "2026-03-09T21:52:49.513742Z", "project": 5, "predictions": [], "drafts": []}
    return task | extra | {"annotations": [annotation | about]}


def stars(count: int) -> dict[str, Any]:
    return {"from_name": "rating", "to_name": "response", "type": "rating", "value": {"rating": count}}


def text(*lines: str) -> dict[str, Any]:
    return {"from_name": "edit", "to_name": "response", "type": "textarea", "value": {"text": list(lines)}}


def better(side: str) -> dict[str, Any]:
    return {"from_name": "better", "to_name": "left,right", "type": "pairwise", "value": {"selected": side}}


def exported(desk: FeedbackService, folder: Path, **options: Any) -> list[dict[str, Any]]:
    export_tasks(desk.stored, folder / "tasks.json", **options)
    tasks: list[dict[str, Any]] = json.loads((folder / "tasks.json").read_text())
    return tasks


def taken(desk: FeedbackService, folder: Path, *tasks: dict[str, Any]) -> ImportResult:
    (folder / "export.json").write_text(json.dumps(tasks))
    return import_annotations(desk, folder / "export.json")


def test_tasks_have_the_keys_that_the_configuration_shows(desk: FeedbackService, tmp_path: Path) -> None:
    tasks = exported(desk, tmp_path)
    assert [task["data"]["rollmill"]["completion"]["id"] for task in tasks] == [one.id for one in groups_of(2)]
    assert tasks[5]["data"]["prompt"] == "How many apples are 13 and 3?\n"
    assert (tasks[5]["data"]["response"], tasks[5]["data"]["reward"]) == ("it is 16", 0.0)
    pairs = exported(desk, tmp_path, pairs=True, steps=[1, 2])
    assert len(pairs) == 8
    assert (pairs[0]["data"]["left"], pairs[0]["data"]["right"]) == ("12 and 3 is 15", "it is 16")
    for made, options in ((tasks, {}), (pairs, {"pairs": True})):
        exported(desk, tmp_path, **options)
        layout = ElementTree.parse(tmp_path / "tasks.xml").getroot()
        values = [one.get("value", "") for one in layout.iter()]
        assert {value[1:] for value in values if value.startswith("$")} <= made[0]["data"].keys()
        shown = {one.get("name") for one in layout.iter("Text")}
        controls = [one for one in layout.iter() if one.get("toName")]
        assert {name for one in controls for name in str(one.get("toName")).split(",")} <= shown


def test_annotations_become_acts_of_their_annotators(desk: FeedbackService, tmp_path: Path) -> None:
    tasks, pairs = exported(desk, tmp_path), exported(desk, tmp_path, pairs=True)
    bob = {"id": 4, "email": "bob@example.org", "first_name": "", "last_name": ""}
    found = taken(
        desk,
        tmp_path,
        annotated(tasks[5], stars(2), text("13 and 3 is 16.", "Done.")),
        annotated(pairs[2], better("left"), id=8, user=bob),
        annotated(tasks[6], text(tasks[6]["data"]["response"]), id=9),
        annotated(tasks[7], stars(5), id=10, was_cancelled=True),
    )
    assert found == ImportResult(new=3, known=0, skipped=2)
    [rated], [expert], [pair] = (everything(desk)[name] for name in ("rated", "expert", "preference"))
    assert (rated.author, rated.created_at) == ("label-studio user 3", 1773094569.0)
    assert (rated.experiences[0].reward, rated.info["of"]) == (0.25, ["main-000005/1"])
    answer = [*TOKENIZER.encode("13 and 3 is 16.\nDone."), END]
    assert expert.experiences[0].token_ids[-len(answer) :].tolist() == answer
    assert pair.author == "bob@example.org"
    assert pair.info["of"] == [pairs[2]["data"]["rollmill"][side]["id"] for side in ("left", "right")]


def test_the_same_annotations_are_taken_once_and_changed_ones_again(desk: FeedbackService, tmp_path: Path) -> None:
    task = exported(desk, tmp_path)[5]
    first = annotated(task, stars(2), text("16"))
    later = annotated(task, stars(4), text("sixteen"), updated_at="2026-03-10T00:00:00Z")
    assert taken(desk, tmp_path, first) == ImportResult(2, 0, 0)
    assert taken(desk, tmp_path, first) == ImportResult(0, 2, 0)
    assert taken(desk, tmp_path, later) == ImportResult(2, 0, 0)
    assert taken(desk, tmp_path, first) == ImportResult(0, 2, 0)
    [rated], [expert] = everything(desk)["rated"], everything(desk)["expert"]
    assert (rated.experiences[0].reward, expert.experiences[0].response) == (0.75, "sixteen")


def test_the_later_of_two_annotations_counts(desk: FeedbackService, tmp_path: Path) -> None:
    task = exported(desk, tmp_path)[5]
    newer = annotated(task, stars(5), id=2, updated_at="2026-03-10T00:00:00Z")
    assert taken(desk, tmp_path, newer, annotated(task, stars(1), id=1)) == ImportResult(2, 0, 0)
    assert [group.experiences[0].reward for group in of_kind(desk, ExperienceKind.RATED)] == [1.0]


def test_an_older_export_does_not_replace_what_a_newer_one_said(desk: FeedbackService, tmp_path: Path) -> None:
    task = exported(desk, tmp_path)[5]
    later = annotated(task, stars(4), text("sixteen"), updated_at="2026-03-10T00:00:00Z")
    assert taken(desk, tmp_path, later) == ImportResult(2, 0, 0)
    assert taken(desk, tmp_path, annotated(task, stars(2), text("16"))) == ImportResult(2, 0, 0)
    [rated], [expert] = everything(desk)["rated"], everything(desk)["expert"]
    assert (rated.experiences[0].reward, expert.experiences[0].response) == (0.75, "sixteen")
    assert taken(desk, tmp_path, annotated(task, stars(2), text("16")), later) == ImportResult(0, 4, 0)
    assert desk.undo(rated.id, "ann")
    assert everything(desk)["rated"] == []


def test_tasks_of_another_run_are_refused(desk: FeedbackService, tmp_path: Path) -> None:
    """Ids are the same in every run."""
    task = exported(desk, tmp_path)[5]
    other = completion(2, "main-000005", 1, "How many apples are 13 and 3?\n", "eleven")
    RolloutLog(desk.stored.run_dir / "rollouts").write(2, [other])
    with pytest.raises(FeedbackError, match=r"task 1: main-000005/1 of step 2 has other tokens .* from another run"):
        taken(desk, tmp_path, annotated(task, stars(2)))
    assert everything(desk)["rated"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"result": [stars(9)]}, "the rating 9 is not one of 1 to 5 stars"),
        (
            {"result": [{"type": "choices", "value": {"choices": ["a"]}, "from_name": "x"}]},
            "type 'choices' are not supported",
        ),
        ({"result": [{"type": "rating"}]}, "no annotation of our configuration"),
        ({"updated_at": "yesterday"}, "no annotation of our configuration"),
    ],
)
def test_annotations_of_another_configuration(
    desk: FeedbackService, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    tasks = exported(desk, tmp_path)
    with pytest.raises(FeedbackError, match=f"export.json: task 2: .*{said}"):
        taken(desk, tmp_path, annotated(tasks[4], stars(1)), annotated(tasks[5], stars(1), **change))
    assert everything(desk)["rated"] == []


@pytest.mark.parametrize(
    "content", ["{", "{}", '[{"prompt": "a", "rating": 3}]', '[{"data": {"text": "a"}, "annotations": []}]']
)
def test_files_that_are_no_export(desk: FeedbackService, tmp_path: Path, content: str) -> None:
    (tmp_path / "export.json").write_text(content)
    with pytest.raises(ConfigError, match=r"export\.json (cannot be read|is not an export of rollmill's tasks)"):
        import_annotations(desk, tmp_path / "export.json")
