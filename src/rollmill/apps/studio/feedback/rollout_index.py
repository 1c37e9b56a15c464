"""Index of a run's stored completions. A step is indexed on first use; tokens are read from the file only for requested
groups."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rollmill.apps.studio.feedback.requests import FeedbackError
from rollmill.errors import RollmillError
from rollmill.trackers.rollout_log import ROLLOUTS_FOLDER, check_run_dir, decode_experience, stored_steps
from rollmill.types import Experience, ExperienceSource

_INDEXED_STEPS, _BEGINNING = 200, 200
_STEPS = 10**9
_ARRAYS = re.compile(rb'"(token_ids|action_mask|logprobs|versions|advantage)": \[[^\]]*\]')
"""Arrays make up most of a line and are not needed for the index. Quotes inside texts are escaped, so they never
match."""


@dataclass(frozen=True, slots=True)
class CompletionEntry:
    """A completion and its byte offset in the step's file."""

    id: str
    reward: float | None
    offset: int


@dataclass(slots=True)
class StoredGroup:
    """The completions of one prompt in one step."""

    step: int
    name: str
    task: str
    prompt: str  #: its beginning
    entries: list[CompletionEntry] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Finite rewards of the group's completions."""
        return [entry.reward for entry in self.entries if entry.reward is not None and math.isfinite(entry.reward)]

    @property
    def spread(self) -> float:
        """Difference between the largest and smallest reward."""
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0


_Index = dict[str, StoredGroup]
_Signature = tuple[int, int, int]


class RolloutIndex:
    """Reads a run's completions, also while the run is writing. Demonstrations of the taskset are left out."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError if `run_dir` is not a run directory."""
        self.run_dir = check_run_dir(run_dir)
        self._indices: OrderedDict[int, tuple[_Signature, _Index]] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Returns the stored steps, in order."""
        return stored_steps(self.run_dir)

    def groups(self, step: int) -> list[StoredGroup]:
        """Returns the groups of a step, in training order. Raises FeedbackError if the step is not stored."""
        with self._open(step) as file:
            return list(self._index(step, file).values())

    def group(self, step: int, name: str) -> list[Experience]:
        """Returns the completions of a group. Raises FeedbackError if it does not exist."""
        with self._open(step) as file:
            found = self._index(step, file).get(name)
            if found is None:
                raise FeedbackError(f"step {step} has no group {name!r}", status=404)
            return [self._read(file, entry) for entry in found.entries]

    def find(self, completion: str, step: int | None = None) -> tuple[int, Experience]:
        """Returns a completion by its id, and its step: the newest one that has it, unless `step` is given.

        Without `step`, files are searched from the newest on. Raises FeedbackError if the completion does not exist.
        """
        for candidate in reversed(self.steps()) if step is None else [step]:
            with self._open(candidate) as file:
                for group in self._index(candidate, file).values():
                    for entry in group.entries:
                        if entry.id == completion:
                            return candidate, self._read(file, entry)
        where = "no stored step" if step is None else f"not step {step}"
        raise FeedbackError(f"{where} of {self.run_dir} has a completion {completion!r}", status=404)

    def _open(self, step: int) -> BinaryIO:
        try:
            if 0 <= step < _STEPS:
                return (self.run_dir / ROLLOUTS_FOLDER / f"step-{step:06d}.jsonl").open("rb")
        except FileNotFoundError:
            pass
        raise FeedbackError(f"{self.run_dir} stores no completions of step {str(step)[:20]}", status=404)

    def _index(self, step: int, file: BinaryIO) -> _Index:
        """Returns the index of an open file, since a resumed run may replace the file at any time."""
        signature = _signature(file.fileno())
        with self._lock:
            known = self._indices.get(step)
            if known is None or known[0] != signature:
                known = signature, _indexed(step, file)
            self._indices[step] = known
            self._indices.move_to_end(step)
            if len(self._indices) > _INDEXED_STEPS:
                self._indices.popitem(last=False)
            return known[1]

    def _read(self, file: BinaryIO, entry: CompletionEntry) -> Experience:
        file.seek(entry.offset)
        try:
            return decode_experience(json.loads(file.readline()))
        except (ValueError, KeyError, TypeError) as error:
            raise RollmillError(f"{file.name}: {entry.id} is not a stored experience ({error!r}).") from error


def _signature(descriptor: int) -> _Signature:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _indexed(step: int, file: BinaryIO) -> _Index:
    index: _Index = {}
    for number, (offset, line) in enumerate(_lines(file), start=1):
        try:
            row = json.loads(_ARRAYS.sub(rb'"\1": []', line))
            if row["source"] != ExperienceSource.ROLLOUT:
                continue
            group = index.setdefault(
                row["group"], StoredGroup(step, row["group"], row["task_id"], row["prompt"][:_BEGINNING])
            )
            reward = None if row["reward"] is None else float(row["reward"])
            group.entries.append(CompletionEntry(row["id"], reward, offset))
        except (ValueError, KeyError, TypeError) as error:
            raise RollmillError(f"{file.name}:{number} is not a stored experience ({error!r}).") from error
    return index


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    file.seek(0)
    offset = 0
    for line in file:
        yield offset, line
        offset += len(line)
