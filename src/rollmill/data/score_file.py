"""Score files of `rollmill tasks score`: a row per task with its success rate and difficulty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollmill.data.images import image_refs_of
from rollmill.data.readers import read_jsonl
from rollmill.errors import ConfigError
from rollmill.files import explain_write_errors, to_jsonable
from rollmill.types import Task

SCORED = "scored"
"""Column with the settings that a row was scored with."""
_BEGINNING = b'{"id": '


class ScoreFile:
    """Append-only file of scored tasks. Removes the incomplete last line of a killed process.

    Args:
        path: created if it does not exist.
        how: settings that the scores depend on; all rows of a file have the same.

    Raises ConfigError: the file is not a score file, or its rows were scored with other settings.
    """

    def __init__(self, path: Path, how: dict[str, Any]) -> None:
        self._path, self._how = path, how
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole == 0 and content and not content.startswith(_BEGINNING):
            raise ConfigError(f"{path}: not a file of `rollmill tasks score`; choose another file")
        self._known = {str(row["id"]): row for row in self._read(bool(content[whole:].strip()))}
        with explain_write_errors(path), path.open("r+b") as file:
            file.truncate(whole)

    def has(self, task: Task) -> bool:
        """True if the task is scored. Raises ConfigError if the file has another task with that id."""
        row = self._known.get(task.id)
        if row is not None and row["prompt"] != task.prompt:
            raise ConfigError(
                f"{self._path}: task {task.id} has a different prompt in the taskset; choose another file"
            )
        return row is not None

    def add(self, rated: list[tuple[Task, dict[str, Any]]]) -> None:
        """Append tasks with their scores. Each line is whole or absent."""
        rows = [task_to_row(task) | to_jsonable(rating) | {SCORED: self._how} for task, rating in rated]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with explain_write_errors(self._path), self._path.open("ab") as file:
            file.write(text.encode())
        self._known |= {row["id"]: row for row in rows}

    def _read(self, unfinished: bool) -> list[dict[str, Any]]:
        """Read the rows, except the last one if it is `unfinished`."""
        rows = []
        records = list(read_jsonl(self._path))
        for record in records[: len(records) - unfinished]:
            ours = {"id", "prompt"} <= record.row.keys() and isinstance(record.row.get(SCORED), dict)
            if record.problem is not None or not ours:
                problem = record.problem or "not a row of `rollmill tasks score`"
                raise ConfigError(f"{record.where}: {problem}; choose another file")
            if record.row[SCORED] != self._how:
                was, now = (", ".join(f"{k} {v}" for k, v in each.items()) for each in (record.row[SCORED], self._how))
                raise ConfigError(f"{record.where}: rated with other settings ({was}; now {now}); choose another file")
            rows.append(record.row)
        return rows


def task_to_row(task: Task) -> dict[str, Any]:
    """Convert a task to a row that loads as the same task (`fields: {id: id}`): texts and metadata columns."""
    row: dict[str, Any] = {"id": task.id, "prompt": task.prompt}
    row |= {key: value for key in ("answer", "response", "rejected") if (value := getattr(task, key)) is not None}
    pictures = image_refs_of(task.metadata)
    columns = task.metadata | ({"images": [picture.path for picture in pictures]} if pictures else {})
    whole: dict[str, Any] = to_jsonable({**row, **{key: value for key, value in columns.items() if key not in row}})
    return whole
