"""Stores and reads the experiences of a run: RUN/rollouts, one file per step."""

from __future__ import annotations

import base64
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.errors import ConfigError, RollmillError
from rollmill.files import atomic_write, explain_write_errors, sync, to_jsonable
from rollmill.types import (
    STORED_FIELDS,
    Experience,
    ExperienceSource,
    FloatArray,
    RoutingArray,
    StopReason,
    Turn,
    fields_of_info,
    stored_info,
)

_DETAILS = {"trainer_logprobs": 8, "entropy": 5}
"""Fields set by the trainer, and the digits that are stored."""


def encode_experience(experience: Experience, *, routing: bool = False) -> dict[str, Any]:
    """Encode an experience as JSON, exactly.

    Arrays become lists; NaN and infinities become their names. Values of `info` that are not JSON become their `repr`.

    Args:
        routing: include the expert routing, which only a trainer can use.
    """
    row = {name: getattr(experience, name) for name in STORED_FIELDS}
    row["info"] = stored_info(experience)
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
    """Inverse of `encode_experience`."""
    known = {name: row[name] for name in STORED_FIELDS} | fields_of_info(row["info"])
    known["routing"] = decode_routing(row.get("routing"))
    known["token_ids"] = np.array(row["token_ids"], np.int32)
    known["action_mask"] = np.array(row["action_mask"], np.bool_)
    known["versions"] = np.array(row["versions"], np.int32)
    known["logprobs"] = _decode_floats(row["logprobs"])
    known["advantage"] = None if row["advantage"] is None else _decode_floats(row["advantage"])
    for name in _DETAILS:
        known[name] = None if row.get(name) is None else _decode_floats(row[name])
    known["turns"] = [Turn(*turn) for turn in row["turns"]]
    known["source"] = ExperienceSource(row["source"])
    known["stop_reason"] = StopReason(row["stop_reason"])
    known["temperature"] = float(row["temperature"])
    known["reward"] = _number(row["reward"])
    known["reward_parts"] = {name: _number(value) for name, value in row["reward_parts"].items()}
    known["timings"] = {name: float(value) for name, value in row["timings"].items()}
    return Experience(**known)


def encode_routing(routing: RoutingArray | None) -> dict[str, Any] | None:
    """Encode expert routing as JSON: little-endian bytes in base64."""
    if routing is None:
        return None
    data = routing.astype(routing.dtype.newbyteorder("<")).tobytes()
    return {"shape": list(routing.shape), "bytes": routing.itemsize, "data": base64.b64encode(data).decode()}


def decode_routing(row: dict[str, Any] | None) -> RoutingArray | None:
    """Inverse of `encode_routing`. Raises ValueError if the size does not match the shape."""
    if row is None:
        return None
    kind: Any = {1: np.uint8, 2: np.uint16}[row["bytes"]]
    flat = np.frombuffer(base64.b64decode(row["data"]), np.dtype(kind).newbyteorder("<"))
    found: RoutingArray = flat.reshape(row["shape"]).astype(kind)
    return found


def _encode_details(experience: Experience) -> dict[str, Any]:
    """Encode the trainer's numbers for each token, for looking at: log-probs to eight digits, so that they can be
    compared with the engine's; entropies to five."""
    found: dict[str, Any] = {}
    for name, digits in _DETAILS.items():
        if (values := getattr(experience, name)) is not None:
            numbers = [float(f"{value:.{digits}g}") for value in values.tolist()]
            found[name] = numbers if np.isfinite(values).all() else to_jsonable(numbers, non_finite="name")
    return found


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _encode_floats(values: FloatArray) -> list[float | str]:
    numbers: list[float | str] = values.tolist()
    return numbers if np.isfinite(values).all() else [to_jsonable(number, non_finite="name") for number in numbers]


def _decode_floats(values: list[float | str]) -> FloatArray:
    return np.array([float(value) for value in values], np.float32)


ROLLOUTS_FOLDER = "rollouts"
_NAME = re.compile(r"step-(\d+)\.jsonl")


class RolloutLog:
    """Writes the experiences of a step to `folder/step-000012.jsonl`, one JSON object per line, atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unsynced: list[Path] = []

    def write(self, step: int, experiences: Sequence[Experience], *, details: bool = True) -> Path:
        """Store a step's experiences, replacing earlier ones of the step. Raises RollmillError if that fails.

        Args:
            details: also store what the trainer knows of each token, where it does.
        """
        rows = [
            {"step": step, **encode_experience(one), **(_encode_details(one) if details else {})} for one in experiences
        ]
        lines = [json.dumps(row, allow_nan=False) for row in rows]
        path = self.folder / f"step-{step:06d}.jsonl"
        atomic_write(path, "".join(line + "\n" for line in lines).encode())
        self._unsynced.append(path)
        return path

    def write_results(self, step: int, results: dict[str, Any]) -> None:
        """Store results beside a step's experiences, as step-000012.json. Raises RollmillError if that fails."""
        path = self.folder / f"step-{step:06d}.json"
        atomic_write(path, (json.dumps(to_jsonable(results), allow_nan=False) + "\n").encode())
        self._unsynced.append(path)

    def sync(self) -> None:
        """Flush what was written since the last call to the disk, so that it survives a power failure."""
        with explain_write_errors(self.folder):
            for path in (*self._unsynced, *([self.folder] if self._unsynced else [])):
                sync(path)
        self._unsynced.clear()

    def drop_after(self, step: int) -> None:
        """Remove the files of later steps, which a resumed run writes again."""
        for later, path in _stored(self.folder).items():
            if later > step:
                with explain_write_errors(path):
                    path.with_suffix(".json").unlink(missing_ok=True)
                    path.unlink()


def stored_steps(run_dir: Path | str) -> list[int]:
    """Steps with stored experiences, in order. Raises ConfigError if `run_dir` is not a run directory."""
    return list(_stored(check_run_dir(run_dir) / ROLLOUTS_FOLDER))


def load_experiences(run_dir: Path | str, step: int | None = None, task: str | None = None) -> list[Experience]:
    """Load the stored experiences of a run, in the order of steps; only those of `step` and of task id `task` if given.

    Raises ConfigError if `run_dir` is not a run directory or nothing is stored for `step` (`task` may match nothing).
    """
    return list(iter_experiences(run_dir, step, task))


def iter_experiences(run_dir: Path | str, step: int | None = None, task: str | None = None) -> Iterator[Experience]:
    """Like `load_experiences`, but holds one experience at a time."""
    files = _stored(check_run_dir(run_dir) / ROLLOUTS_FOLDER)
    if step is not None and step not in files:
        raise ConfigError(f"{run_dir} stores no experiences of step {step}. {_nearest(step, list(files))}")
    return _read([files[step]] if step is not None else list(files.values()), task)


def check_run_dir(run_dir: Path | str) -> Path:
    """Return `run_dir` as a path. Raises ConfigError, naming nearby runs, unless it holds a run."""
    path = Path(run_dir)
    if _is_run(path):
        return path
    what = "holds no run (no config.yaml, metrics.jsonl or rollouts/)" if path.is_dir() else "is no folder"
    folder = path if path.is_dir() else path.parent
    runs = sorted(child.name for child in folder.iterdir() if _is_run(child)) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, runs, n=3, cutoff=0.5) or runs[:3]
    advice = f"Runs found there: {', '.join(str(folder / name) for name in close)}." if close else "Check the path."
    raise ConfigError(f"{path} {what}. {advice}")


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", ROLLOUTS_FOLDER, "config.yaml"))


def _stored(folder: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.jsonl"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def _nearest(step: int, steps: list[int]) -> str:
    if not steps:
        return "It stores none at all: no step has ended yet, or the run was made without rollouts."
    near = sorted(sorted(steps, key=lambda other: abs(other - step))[:3])
    return f"Stored: {len(steps)} steps from {steps[0]} to {steps[-1]}; nearest {', '.join(map(str, near))}."


def _read(paths: list[Path], task: str | None) -> Iterator[Experience]:
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    if task is None or row["task_id"] == task:
                        experience = decode_experience(row)
                    else:
                        continue
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise RollmillError(f"{path}:{number} is not a stored experience ({error!r}).") from error
                yield experience
