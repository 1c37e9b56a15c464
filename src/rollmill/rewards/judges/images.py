"""Pictures of a task for a judge that sees."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from rollmill.core.types import Task


def image_parts(task: Task) -> list[dict[str, Any]]:
    """The task's pictures (its column `images`) as parts of a chat message.

    Raises ValueError where a picture is missing, or is another one than its hash says.
    """
    references = task.metadata.get("images") or []
    if not isinstance(references, list):
        raise ValueError(f"the task's column `images` is {references!r:.80}; expected a list of pictures")
    return [{"type": "image_url", "image_url": {"url": _data_url(each)}} for each in references]


def _data_url(reference: Any) -> str:
    """The picture of a mapping with path, sha256 and media_type as a data: URL (RFC 2397)."""
    try:
        path, expected, kind = Path(reference["path"]), str(reference["sha256"]), str(reference["media_type"])
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"a picture of the task is {reference!r:.80}; expected a mapping with path, sha256 and media_type"
        ) from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the task's picture {path} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"the task's picture {path} has changed: its sha256 is {found}, expected {expected}")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
