"""Experiences as JSON objects, exactly: every float32 comes back bit for bit, and no number is rounded."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from rollmill.files import to_jsonable
from rollmill.types import STORED_FIELDS, Experience, ExperienceSource, FloatArray, RoutingArray, StopReason, Turn


def encode_experience(experience: Experience, *, routing: bool = False) -> dict[str, Any]:
    """An experience as JSON can hold it.

    Arrays become lists; NaN and infinities become their names. Values of `info` that JSON has no notion of are stored
    as their `repr`.

    Args:
        routing: keep the experts of its tokens, too, which only a trainer can use.
    """
    row = {name: getattr(experience, name) for name in STORED_FIELDS}
    if routing and experience.routing is not None:
        row["routing"] = encode_routing(experience.routing)
    row["token_ids"] = experience.token_ids.tolist()
    row["action_mask"] = experience.action_mask.astype(np.int8).tolist()
    row["versions"] = experience.versions.tolist()
    row["logprobs"] = _encode_floats(experience.logprobs)
    row["advantage"] = None if experience.advantage is None else _encode_floats(experience.advantage)
    row["turns"] = [[turn.role, turn.start, turn.end, turn.text] for turn in experience.turns]
    for name in ("reward", "reward_parts", "timings", "temperature", "info"):
        row[name] = to_jsonable(row[name], non_finite="name")
    return row


def decode_experience(row: dict[str, Any]) -> Experience:
    """The experience that `encode_experience` made `row` from."""
    known = {name: row[name] for name in STORED_FIELDS}
    known["routing"] = decode_routing(row.get("routing"))
    known["token_ids"] = np.array(row["token_ids"], np.int32)
    known["action_mask"] = np.array(row["action_mask"], np.bool_)
    known["versions"] = np.array(row["versions"], np.int32)
    known["logprobs"] = _decode_floats(row["logprobs"])
    known["advantage"] = None if row["advantage"] is None else _decode_floats(row["advantage"])
    known["turns"] = [Turn(*turn) for turn in row["turns"]]
    known["source"] = ExperienceSource(row["source"])
    known["stop_reason"] = StopReason(row["stop_reason"])
    known["temperature"] = float(row["temperature"])
    known["reward"] = _number(row["reward"])
    known["reward_parts"] = {name: _number(value) for name, value in row["reward_parts"].items()}
    known["timings"] = {name: float(value) for name, value in row["timings"].items()}
    return Experience(**known)


def encode_routing(routing: RoutingArray | None) -> dict[str, Any] | None:
    """Experts of tokens as JSON can hold them: little-endian bytes in base64."""
    if routing is None:
        return None
    data = routing.astype(routing.dtype.newbyteorder("<")).tobytes()
    return {"shape": list(routing.shape), "bytes": routing.itemsize, "data": base64.b64encode(data).decode()}


def decode_routing(row: dict[str, Any] | None) -> RoutingArray | None:
    """The experts that `encode_routing` made `row` from. Raises ValueError where their number does not fit."""
    if row is None:
        return None
    kind: Any = {1: np.uint8, 2: np.uint16}[row["bytes"]]
    flat = np.frombuffer(base64.b64decode(row["data"]), np.dtype(kind).newbyteorder("<"))
    found: RoutingArray = flat.reshape(row["shape"]).astype(kind)
    return found


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _encode_floats(values: FloatArray) -> list[float | str]:
    numbers: list[float | str] = values.tolist()
    return numbers if np.isfinite(values).all() else [to_jsonable(number, non_finite="name") for number in numbers]


def _decode_floats(values: list[float | str]) -> FloatArray:
    return np.array([float(value) for value in values], np.float32)
