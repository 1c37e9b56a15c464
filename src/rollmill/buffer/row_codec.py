"""Encodes groups, experiences and tasks as table rows: arrays as bytes, everything else as ASCII JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.buffer.base import ExperienceKind, Group
from rollmill.files import to_jsonable
from rollmill.trackers.rollout_log import decode_routing, encode_routing
from rollmill.types import (
    STORED_FIELDS,
    BoolArray,
    Experience,
    ExperienceSource,
    FloatArray,
    IntArray,
    StopReason,
    Task,
    Turn,
    fields_of_info,
    stored_info,
)

# Arrays of a group are concatenated and stored as little-endian bytes, exactly; flags and versions as run lengths.

_INT, _FLOAT, _FLAG = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")
_NONE = -1


def pack_lengths(columns: Iterable[Sequence[Any]]) -> bytes:
    """Each array's length as int32, column by column; -1 for None."""
    return np.array([[_NONE if one is None else len(one) for one in column] for column in columns], _INT).tobytes()


def unpack_lengths(data: bytes, columns: int) -> list[list[int]]:
    """Inverse of `pack_lengths`: a list per column."""
    found: list[list[int]] = np.frombuffer(data, _INT).reshape(columns, -1).tolist()
    return found


def pack_ints(arrays: Sequence[IntArray]) -> bytes:
    """int32 as 4 bytes each."""
    return _joined(arrays, _INT).tobytes()


def unpack_ints(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """Inverse of `pack_ints`. Like all unpack functions, raises ValueError if the lengths do not fit."""
    return _split(np.frombuffer(data, _INT).astype(np.int32), lengths)


def pack_floats(arrays: Sequence[FloatArray | None]) -> bytes:
    """float32 as 4 bytes each; keeps the payload of NaN and the sign of zero."""
    return _joined([one for one in arrays if one is not None], _FLOAT).tobytes()


def unpack_floats(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """Inverse of `pack_floats`."""
    return _split(np.frombuffer(data, _FLOAT).astype(np.float32), lengths)


def pack_versions(arrays: Sequence[IntArray]) -> bytes:
    """int32 as pairs of int32: a value, and its run length."""
    return _runs(_joined(arrays, _INT))


def unpack_versions(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """Inverse of `pack_versions`."""
    return _split(_expand_runs(data).astype(np.int32, copy=False), lengths)


def pack_flags(arrays: Sequence[BoolArray]) -> bytes:
    """Flags as pairs of int32: 0 or 1, and its run length."""
    return _runs(_joined(arrays, _FLAG))


def unpack_flags(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """Inverse of `pack_flags`."""
    return _split(_expand_runs(data).astype(_FLAG), lengths)


def _joined(arrays: Sequence[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype)


def _split(values: npt.NDArray[Any], lengths: Sequence[int]) -> list[Any]:
    bounds = list(accumulate((max(length, 0) for length in lengths), initial=0))
    if bounds[-1] != len(values):
        raise ValueError(f"{len(values)} values where {bounds[-1]} belong")
    return [
        None if length == _NONE else values[start:end]
        for length, (start, end) in zip(lengths, pairwise(bounds), strict=True)
    ]


def _runs(values: npt.NDArray[Any]) -> bytes:
    if not len(values):
        return b""
    last = np.flatnonzero(values[1:] != values[:-1])
    pairs = np.empty((len(last) + 1, 2), _INT)
    pairs[:-1, 0], pairs[-1, 0] = values[last], values[-1]
    pairs[:-1, 1], pairs[-1, 1] = last + 1, len(values)
    pairs[1:, 1] -= pairs[:-1, 1].copy()
    return pairs.tobytes()


def _expand_runs(data: bytes) -> npt.NDArray[Any]:
    pairs = np.frombuffer(data, _INT).reshape(-1, 2)
    return pairs[:, 0].repeat(pairs[:, 1])


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
    """Columns of a group's experiences: `body`, a JSON list, and one per array, concatenated."""
    columns = {name: [getattr(each, name) for each in experiences] for name in _ARRAYS}
    packed = {name: pack(columns[name]) for name, (pack, _) in _ARRAYS.items()}
    body = f"[{','.join(map(encode_experience_body, experiences))}]"
    return {"body": body, "lengths": pack_lengths(columns.values()), **packed}


def decode_experience_columns(row: Any) -> list[Experience]:
    """Inverse of `encode_experience_columns`.

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
    """Everything but arrays, as JSON; expert routing, which few models have, in base64."""
    body = {name: getattr(experience, name) for name in _PLAIN}
    body["info"] = stored_info(experience)
    if (routing := encode_routing(experience.routing)) is not None:
        body["routing"] = routing
    body["turns"] = [[turn.role, turn.start, turn.end, _shared(turn.text, experience)] for turn in experience.turns]
    return to_json(body)


def decode_experience_body(body: str, **arrays: Any) -> Experience:
    """Inverse of `encode_experience_body`, with these arrays."""
    return _experience(json.loads(body), arrays)


def _experience(values: dict[str, Any], arrays: dict[str, Any]) -> Experience:
    texts = (values["prompt"], values["response"])
    turns = [
        Turn(role, start, end, text if isinstance(text, str) else texts[text])
        for role, start, end, text in values.pop("turns")
    ]
    values["routing"] = decode_routing(values.get("routing"))
    values["source"], values["stop_reason"] = ExperienceSource(values["source"]), StopReason(values["stop_reason"])
    return Experience(**values | fields_of_info(values["info"]), turns=turns, **arrays)


def encode_group(group: Group, inside: TableRow) -> TableRow:
    """A group's columns except run and number; `inside` are the columns of its experiences."""
    rewards = [experience.reward for experience in group.experiences]
    scored = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    return {
        "id": group.id,
        "shelf": str(group.kind),
        "writer": group.writer,
        "author": escape_for_database(group.author),
        "task_id": escape_for_database(group.experiences[0].task_id if group.experiences else ""),
        "created_at": group.created_at,
        "priority": float(group.priority),
        "oldest_version": group.oldest_version,
        "size": len(group.experiences),
        "bytes": sum(map(len, inside.values())),
        "reward": float(sum(scored) / len(scored)) if scored else None,
        "rewards": to_json(rewards),
        "body": to_json({"author": group.author, "info": group.info}),
    }


def decode_group(row: Any, experiences: list[Experience]) -> Group:
    """Inverse of `encode_group`, with these experiences."""
    known = {name: getattr(row, name) for name in ("id", "priority", "writer", "created_at")}
    return Group(experiences=experiences, kind=ExperienceKind(row.shelf), **known, **json.loads(row.body))


def encode_task(task: Task) -> str:
    """A task as JSON; images are references in its metadata (data/images.py)."""
    return to_json(asdict(task))


def decode_task(text: str) -> Task:
    """Inverse of `encode_task`."""
    return Task(**json.loads(text))


def to_json(value: Any) -> str:
    """ASCII JSON, because databases refuse NUL and lone surrogates; NaN and infinities as in Python's `json`.

    Other types are stored as their `repr`, see `rollmill.files.to_jsonable`.
    """
    try:
        return _JSON.encode(value)
    except TypeError:  # keys that are neither text nor numbers
        return json.dumps(to_jsonable(value, non_finite="name"), separators=(",", ":"))


def escape_for_database(text: str) -> str:
    """Escape what databases refuse in `text`; the JSON body holds the exact text."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _shared(text: str, experience: Experience) -> str | int:
    """A turn's text, or 0 or 1 if it equals the prompt or the response, which are stored anyway."""
    return 0 if text == experience.prompt else 1 if text == experience.response else text
