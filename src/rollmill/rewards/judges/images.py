"""Pictures of a task for a judge that sees."""

from __future__ import annotations

from typing import Any

from rollmill.data.images import data_url, image_refs_of
from rollmill.types import Task


def image_parts(task: Task) -> list[dict[str, Any]]:
    """The task's pictures (its column `images`) as parts of a chat message.

    Raises ValueError where the column holds something else, TasksetError where a picture is no longer what it was.
    """
    column, references = task.metadata.get("images") or [], image_refs_of(task.metadata)
    if not isinstance(column, list) or len(references) != len(column):
        raise ValueError(
            f"the task's column `images` is {column!r:.80}, not pictures that the taskset found; correct the paths, or "
            "set images: false"
        )
    return [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in references]
