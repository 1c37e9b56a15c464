"""Base class of samplers: a taskset, an identity that a restored state has to match, and tasks by index."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollmill.data.readers import to_finite_number
from rollmill.errors import TasksetError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.data.taskset import Taskset

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Sampler(ABC):
    """Yields the tasks of a taskset forever."""

    def begin(self, taskset: Taskset, seed: int, order: Any) -> None:
        """Begin with the tasks of a taskset.

        Args:
            taskset: not empty.
            seed: seed of all randomness.
            order: identifies how tasks are chosen, in a state.
        """
        assert taskset.tasks
        self._taskset, self._seed = taskset, seed
        self._identity: dict[str, Any] = {
            "size": len(taskset.tasks),
            "fingerprint": taskset.fingerprint(),
            "order": order,
            "seed": seed,
        }

    @property
    @abstractmethod
    def uses_success(self) -> bool:
        """True if `observe` changes anything."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Epoch of the last task that `next` returned, from 0; draws / tasks for samplers without epochs."""

    @abstractmethod
    def next(self, step: int = 0) -> Task:
        """The next task; `step` is the training step of the stage, from 0."""

    @abstractmethod
    def observe(self, task_id: str, successes: Sequence[float]) -> None:
        """Record the success (0 to 1) of each completion of a task's group, which has at least one.

        Called in the order in which groups were submitted. Tasks of other tasksets are ignored.
        """

    def observe_rewards(self, task_id: str, rewards: Sequence[float]) -> None:  # noqa: B027 (samplers may ignore it)
        """Record the rewards of a task's group as they are."""

    def pause(self, name: str, reason: str) -> bool:
        """Leave out the tasks of a domain for a while; False if the sampler cannot."""
        return False

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics of the sampler for the training step."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """State without the identity. Later draws do not change the returned value."""

    @abstractmethod
    def resume(self, state: dict[str, Any]) -> None:
        """Restore the result of `progress`."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain JSON."""
        return {**self.progress(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`.

        Raises:
            TasksetError: the state belongs to another taskset, sampler or seed.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                name = "sampler" if key == "order" else key  # what checkpoints call it
                raise TasksetError(
                    f"taskset {self._taskset.name} changed since the checkpoint ({name} was {_words(state.get(key))}, "
                    f"is {_words(value)}); restore it to resume this run, or start a new run"
                )
        self.resume(state)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Task id -> index in the taskset."""
        return {task.id: number for number, task in enumerate(self._taskset.tasks)}

    def _column(self, column: str, key: str) -> Floats:
        """Numbers from each task's metadata, [tasks]; adds them to the identity.

        Raises TasksetError if a task has none.
        """
        values = [to_finite_number(task.metadata.get(column)) for task in self._taskset.tasks]
        wrong = [number for number, value in enumerate(values) if value is None]
        if wrong:
            task = self._taskset.tasks[wrong[0]]
            raise TasksetError(
                f"{key}: {len(wrong)} of {len(values)} tasks have no number in the column {column} (first: task "
                f"{task.id}); name another column, or give them one by the operator `difficulty` of taskset.pipeline"
            )
        found = np.array(values, np.float64)
        self._identity[f"column {column}"] = hashlib.sha256(found.tobytes()).hexdigest()[:16]
        return found


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"


def counter_rng(*counters: int) -> np.random.Generator:
    """Random generator that depends only on `counters`, so that no generator's state has to be stored."""
    return np.random.default_rng([counter % 2**64 for counter in counters])


def encode_array(array: npt.NDArray[Any]) -> str:
    """Encode an array as base64 of its little-endian bytes: exact, and a hundred times faster than a list."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def decode_array(text: str, kind: type[np.float64] | type[np.int64]) -> npt.NDArray[Any]:
    """Inverse of `encode_array`."""
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)
