"""Groups, their experiences and tasks as rows of tables: arrays as bytes, everything else as JSON in ASCII."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rollmill.buffer.array_codec import (
    pack_flags,
    pack_floats,
    pack_ints,
    pack_lengths,
    pack_versions,
    unpack_flags,
    unpack_floats,
    unpack_ints,
    unpack_lengths,
    unpack_versions,
)
from rollmill.buffer.base import ExperienceKind, Group
from rollmill.files import to_jsonable
from rollmill.serialization import decode_routing, encode_routing
from rollmill.types import STORED_FIELDS, Experience, ExperienceSource, StopReason, Task, Turn

TableRow = dict[str, Any]
_ARRAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes, Sequence[int]], list[Any]]]] = {
    "token_ids": (pack_ints, unpack_ints),
    "logprobs": (pack_floats, unpack_floats),
    "versions": (pack_versions, unpack_versions),
    "action_mask": (pack_flags, unpack_flags),
    "advantage": (pack_floats, unpack_floats),
}
_JSON = json.JSONEncoder(default=to_jsonable, separators=(",", ":"))
_PLAIN = tuple(name for name in STORED_FIELDS if name not in (*_ARRAYS, "turns"))


def encode_experience_columns(experiences: Sequence[Experience]) -> TableRow:
    """Columns of a group's experiences: `body`, a JSON list, and one per array with those of all, end to end."""
    columns = {name: [getattr(each, name) for each in experiences] for name in _ARRAYS}
    packed = {name: pack(columns[name]) for name, (pack, _) in _ARRAYS.items()}
    body = f"[{','.join(map(encode_experience_body, experiences))}]"
    return {"body": body, "lengths": pack_lengths(columns.values()), **packed}


def decode_experience_columns(row: Any) -> list[Experience]:
    """The experiences that `encode_experience_columns` made the columns of `row` from.

    Raises:
        ValueError, KeyError, TypeError: the row is damaged.
    """
    lengths = unpack_lengths(row.lengths, len(_ARRAYS))
    columns = [
        unpack(getattr(row, name), sizes) for (name, (_, unpack)), sizes in zip(_ARRAYS.items(), lengths, strict=True)
    ]
    return [
        _experience(values, dict(zip(_ARRAYS, arrays, strict=True)))
        for values, *arrays in zip(json.loads(row.body), *columns, strict=True)
    ]


def encode_experience_body(experience: Experience) -> str:
    """Everything but arrays, as JSON; experts of tokens, which few models have, are in base64."""
    body = {name: getattr(experience, name) for name in _PLAIN}
    if (routing := encode_routing(experience.routing)) is not None:
        body["routing"] = routing
    body["turns"] = [[turn.role, turn.start, turn.end, _shared(turn.text, experience)] for turn in experience.turns]
    return to_json(body)


def decode_experience_body(body: str, **arrays: Any) -> Experience:
    """The experience with these arrays that `encode_experience_body` made `body` from."""
    return _experience(json.loads(body), arrays)


def _experience(values: dict[str, Any], arrays: dict[str, Any]) -> Experience:
    texts = (values["prompt"], values["response"])
    turns = [
        Turn(role, start, end, text if isinstance(text, str) else texts[text])
        for role, start, end, text in values.pop("turns")
    ]
    values["routing"] = decode_routing(values.get("routing"))
    values["source"], values["stop_reason"] = ExperienceSource(values["source"]), StopReason(values["stop_reason"])
    return Experience(**values, turns=turns, **arrays)


def encode_group(group: Group, inside: TableRow) -> TableRow:
    """A group's columns, but for where it stands; `inside` are those of its experiences."""
    rewards = [experience.reward for experience in group.experiences]
    judged = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    return {
        "id": group.id,
        "shelf": str(group.shelf),
        "writer": group.writer,
        "author": escape_for_database(group.author),
        "task_id": escape_for_database(group.experiences[0].task_id if group.experiences else ""),
        "created_at": group.created_at,
        "priority": float(group.priority),
        "oldest_version": group.oldest_version,
        "size": len(group.experiences),
        "bytes": sum(map(len, inside.values())),
        "reward": float(sum(judged) / len(judged)) if judged else None,
        "rewards": to_json(rewards),
        "body": to_json({"author": group.author, "info": group.info}),
    }


def decode_group(row: Any, experiences: list[Experience]) -> Group:
    """The group that `encode_group` made the columns of `row` from."""
    known = {name: getattr(row, name) for name in ("id", "priority", "writer", "created_at")}
    return Group(experiences=experiences, shelf=ExperienceKind(row.shelf), **known, **json.loads(row.body))


def encode_task(task: Task) -> str:
    """A task as JSON; pictures are references in its metadata (data/images.py)."""
    return to_json(asdict(task))


def decode_task(text: str) -> Task:
    """The task that `encode_task` made `text` from."""
    return Task(**json.loads(text))


def to_json(value: Any) -> str:
    """ASCII, since databases refuse NUL and lone surrogates; NaN and infinities as Python's `json` has them.

    What JSON has no notion of is stored as its `repr`, see `monitor.files.plain`.
    """
    try:
        return _JSON.encode(value)
    except TypeError:  # keys that are neither text nor numbers
        return json.dumps(to_jsonable(value, non_finite="name"), separators=(",", ":"))


def escape_for_database(text: str) -> str:
    """`text` as any database can hold it; the exact one stands in the JSON."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _shared(text: str, experience: Experience) -> str | int:
    """A turn's text, or 0 and 1 where it is the prompt or the response, which are stored anyway."""
    return 0 if text == experience.prompt else 1 if text == experience.response else text
