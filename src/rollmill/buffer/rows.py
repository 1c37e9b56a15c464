"""Groups, experiences and tasks as rows of tables: arrays as bytes, everything else as JSON in ASCII."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rollmill.buffer.base import Group, Shelf
from rollmill.buffer.runlength import (
    pack_floats,
    pack_ints,
    pack_runs,
    unpack_flags,
    unpack_floats,
    unpack_ints,
    unpack_runs,
)
from rollmill.core.types import Experience, Source, StopReason, Task, Turn
from rollmill.monitor.files import plain

Row = dict[str, Any]
ARRAYS = ("token_ids", "logprobs", "versions", "action_mask", "advantage")
_JSON = json.JSONEncoder(default=plain, separators=(",", ":"))
_PLAIN = tuple(field.name for field in fields(Experience) if field.name not in (*ARRAYS, "turns"))


def experience_row(experience: Experience) -> Row:
    """An experience's columns: `body` and one per array."""
    advantage = experience.advantage
    return {
        "body": experience_body(experience),
        "token_ids": pack_ints(experience.token_ids),
        "logprobs": pack_floats(experience.logprobs),
        "versions": pack_runs(experience.versions),
        "action_mask": pack_runs(experience.action_mask),
        "advantage": None if advantage is None else pack_floats(advantage),
    }


def experience_from(row: Any) -> Experience:
    """The experience that `experience_row` made the columns of `row` from."""
    return experience_of(
        row.body,
        token_ids=unpack_ints(row.token_ids),
        logprobs=unpack_floats(row.logprobs),
        versions=unpack_runs(row.versions),
        action_mask=unpack_flags(row.action_mask),
        advantage=None if row.advantage is None else unpack_floats(row.advantage),
    )


def experience_body(experience: Experience) -> str:
    """Everything but arrays, as JSON."""
    body = {name: getattr(experience, name) for name in _PLAIN}
    body["turns"] = [[turn.role, turn.start, turn.end, _shared(turn.text, experience)] for turn in experience.turns]
    return to_json(body)


def experience_of(body: str, **arrays: Any) -> Experience:
    """The experience with these arrays that `experience_body` made `body` from."""
    values = json.loads(body)
    texts = (values["prompt"], values["response"])
    turns = [
        Turn(role, start, end, text if isinstance(text, str) else texts[text])
        for role, start, end, text in values.pop("turns")
    ]
    values["source"], values["stop_reason"] = Source(values["source"]), StopReason(values["stop_reason"])
    return Experience(**values, turns=turns, **arrays)


def group_row(group: Group, rows: Sequence[Row]) -> Row:
    """A group's columns, but for where it stands; `rows` are those of its experiences."""
    rewards = [experience.reward for experience in group.experiences]
    judged = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    return {
        "id": group.id,
        "shelf": str(group.shelf),
        "writer": group.writer,
        "author": searchable(group.author),
        "task_id": searchable(group.experiences[0].task_id if group.experiences else ""),
        "created_at": group.created_at,
        "priority": float(group.priority),
        "oldest_version": group.oldest_version,
        "size": len(rows),
        "bytes": sum(len(value) for row in rows for value in row.values() if value is not None),
        "reward": float(sum(judged) / len(judged)) if judged else None,
        "rewards": to_json(rewards),
        "body": to_json({"author": group.author, "info": group.info}),
    }


def group_from(row: Any, experiences: list[Experience]) -> Group:
    """The group that `group_row` made the columns of `row` from."""
    known = {name: getattr(row, name) for name in ("id", "priority", "writer", "created_at")}
    return Group(experiences=experiences, shelf=Shelf(row.shelf), **known, **json.loads(row.body))


def task_json(task: Task) -> str:
    """A task as JSON; pictures are references in its metadata (tasks/images.py)."""
    return to_json(asdict(task))


def task_from(text: str) -> Task:
    """The task that `task_json` made `text` from."""
    return Task(**json.loads(text))


def to_json(value: Any) -> str:
    """ASCII, since databases refuse NUL and lone surrogates; NaN and infinities as Python's `json` has them.

    What JSON has no notion of is stored as its `repr`, see `monitor.files.plain`.
    """
    try:
        return _JSON.encode(value)
    except TypeError:  # keys that are neither text nor numbers
        return json.dumps(plain(value, non_finite="name"), separators=(",", ":"))


def searchable(text: str) -> str:
    """`text` as any database can hold it; the exact one stands in the JSON."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _shared(text: str, experience: Experience) -> str | int:
    """A turn's text, or 0 and 1 where it is the prompt or the response, which are stored anyway."""
    return 0 if text == experience.prompt else 1 if text == experience.response else text
