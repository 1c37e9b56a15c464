"""Label Studio: exports completions as tasks and imports annotations as feedback. Works on files; needs no Label
Studio.

Formats: tasks are `{"data": {...}}` (labelstud.io/guide/task_format); JSON exports add `annotations`, each with
`result`, a list of the values of the labelling configuration's controls (labelstud.io/guide/export).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollmill.apps.studio.feedback.requests import FeedbackError, parse_request
from rollmill.apps.studio.feedback.rollout_index import RolloutIndex
from rollmill.apps.studio.feedback.service import FeedbackService, SubmittedRequest
from rollmill.errors import ConfigError
from rollmill.files import atomic_write, describe_json_error, parse_strict_json, read_text
from rollmill.types import Experience

STARS = 5
COMPLETIONS, PAIRS = "label-studio.xml", "label-studio-pairs.xml"


def export_tasks(stored: RolloutIndex, path: Path, *, steps: Sequence[int] = (), pairs: bool = False) -> int:
    """Writes tasks for a Label Studio project to `path`, and the labelling configuration to `path` with the ending
    .xml.

    Args:
        steps: steps whose completions are exported; default: the newest stored step.
        pairs: show two completions of a group (the first two, the next two, ...) per task instead of one.

    Returns the number of tasks. Raises FeedbackError if a step is not stored.
    """
    chosen = steps or stored.steps()[-1:]
    if not chosen:
        raise FeedbackError(f"{stored.run_dir} stores no completions yet", status=404)
    tasks = [task for step in chosen for task in _tasks(stored, step, pairs)]
    atomic_write(path, json.dumps(tasks, indent=1).encode())
    layout = files("rollmill.apps.studio.feedback").joinpath("static", PAIRS if pairs else COMPLETIONS).read_bytes()
    atomic_write(path.with_suffix(".xml"), layout)
    return len(tasks)


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Counts of an import."""

    new: int
    known: int  #: imported before
    skipped: int  #: annotations that were cancelled or are empty


def import_annotations(service: FeedbackService, path: Path) -> ImportResult:
    """Imports the annotations of an export, all or none, with annotators as authors. Known annotations are skipped;
    changed ones replace the old state.

    Raises:
        ConfigError: the file cannot be read or is not a JSON export.
        FeedbackError: a task belongs to another run, or an annotation has another labelling configuration.
    """
    submitted: list[SubmittedRequest] = []
    skipped = 0
    for number, task in enumerate(_read(path), start=1):
        for annotation in task["annotations"]:
            try:
                made = list(_annotation_requests(service.stored, task, annotation))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise FeedbackError(f"{path}: task {number}: no annotation of our configuration ({error!r})") from error
            except FeedbackError as error:
                raise FeedbackError(f"{path}: task {number}: {error}", error.status) from error
            submitted += made
            skipped += not made
    done = service.submit_all(sorted(submitted, key=lambda each: each.at or 0.0))
    return ImportResult(done.new, len(submitted) - done.new, skipped)


def _tasks(stored: RolloutIndex, step: int, pairs: bool) -> Iterator[dict[str, Any]]:
    for group in stored.groups(step):
        experiences = stored.group(step, group.name)
        if pairs:
            for left, right in zip(experiences[::2], experiences[1::2], strict=False):
                if left.response != right.response:
                    texts = {"left": left.response, "right": right.response}
                    about = {"step": step, "left": _mark(left), "right": _mark(right)}
                    yield {"data": {"prompt": left.prompt, **texts, "rollmill": about}}
        else:
            for one in experiences:
                about = {"step": step, "completion": _mark(one)}
                yield {
                    "data": {"prompt": one.prompt, "response": one.response, "reward": one.reward, "rollmill": about}
                }


def _mark(experience: Experience) -> dict[str, str]:
    """Identifies a completion by id and token hash, because ids are the same in every run."""
    return {"id": experience.id, "tokens": sha256(experience.token_ids.tobytes()).hexdigest()[:16]}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        tasks = parse_strict_json(read_text(path))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {describe_json_error(error)}") from error
    whole = isinstance(tasks, list) and all(
        isinstance(task, dict)
        and isinstance(task.get("annotations"), list)
        and isinstance(task.get("data"), dict)
        and isinstance(task["data"].get("rollmill"), dict)
        for task in tasks
    )
    if not whole:
        raise ConfigError(
            f"{path} is not an export of rollmill's tasks: in Label Studio choose Export and the format JSON (not "
            "JSON-MIN), in a project with the tasks of --export-label-studio"
        )
    return list(tasks)


def _annotation_requests(
    stored: RolloutIndex, task: dict[str, Any], annotation: dict[str, Any]
) -> Iterator[SubmittedRequest]:
    """Yields the requests of an annotation; none if it was cancelled."""
    if annotation.get("was_cancelled"):
        return
    about = task["data"]["rollmill"]
    author = _author(annotation.get("completed_by"))
    at = _seconds(annotation.get("updated_at") or annotation["created_at"])
    origin = f"label-studio {annotation.get('project') or task.get('project')} {annotation['id']}"
    for result in annotation["result"]:
        row = _request(stored, about, result, task["data"])
        if row is None:
            continue
        digest = sha256(json.dumps([about, row], sort_keys=True).encode()).hexdigest()[:16]
        request = parse_request(row | {"author": author, "key": f"{origin} {result['from_name']} {digest}"})
        yield SubmittedRequest(request, at, f"{origin} edit" if "text" in row else "")


def _request(
    stored: RolloutIndex, about: dict[str, Any], result: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any] | None:
    step, value = int(about["step"]), result["value"]
    match result["type"]:
        case "rating":
            stars = value["rating"]
            if stars not in range(1, STARS + 1):
                raise FeedbackError(f"the rating {stars!r} is not one of 1 to {STARS} stars")
            completion = _same(stored, step, about["completion"])
            return {"completion": completion, "step": step, "rating": (stars - 1) / (STARS - 1)}
        case "textarea":
            text = value["text"] if isinstance(value["text"], str) else "\n".join(value["text"])
            if not text.strip() or text == data["response"]:
                return None  # the field starts with the completion's text
            return {"completion": _same(stored, step, about["completion"]), "step": step, "text": text}
        case "pairwise":
            sides = ("left", "right") if value["selected"] == "left" else ("right", "left")
            better, worse = (_same(stored, step, about[side]) for side in sides)
            return {"better": better, "worse": worse, "step": step}
        case other:
            raise FeedbackError(f"results of the type {other!r} are not supported: use rating, textarea or pairwise")


def _same(stored: RolloutIndex, step: int, mark: dict[str, str]) -> str:
    """Returns the id of a completion. Raises FeedbackError if this run has another completion of that id."""
    _, experience = stored.find(mark["id"], step)
    if _mark(experience) != mark:
        raise FeedbackError(
            f"{mark['id']} of step {step} has other tokens in {stored.run_dir}: the tasks were exported from another "
            "run, or the run was resumed before that step"
        )
    return experience.id


def _author(user: Any) -> str:
    if isinstance(user, dict):
        names = " ".join(str(user.get(key) or "") for key in ("first_name", "last_name")).strip()
        return str(user.get("email") or user.get("username") or names or f"label-studio user {user.get('id')}")
    return f"label-studio user {user}"


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
