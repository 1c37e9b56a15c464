"""Users' samplers: a function that returns a weight for each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import PrivateAttr

from rollmill.config.section import register_section, section_from_signature
from rollmill.data.samplers.base import Floats, Ints
from rollmill.data.samplers.builtin.batch_sampler import WeightedSampler
from rollmill.errors import TasksetError, user_code_location
from rollmill.types import Task

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class TaskView:
    """Input of a user's sampler. Arrays have one entry per task."""

    tasks: Sequence[Task]
    rates: Floats  #: success rates; the prior for tasks without rollouts
    groups: Ints  #: number of groups that were rolled out
    step: int  #: training step of the stage, from 0


def sampler(function: Function) -> Function:
    """Register a sampler under its name: `taskset: {sampler: NAME}`.

    The function takes a `TaskView` and returns a weight of at least 0 for each task; tasks are drawn in proportion.
    It is called once per batch. Keyword-only parameters with a type and a default are keys of the run file, beside
    those of all samplers that track success.

    Raises ConfigError naming the parameter that lacks a type or a default.
    """
    register_section("sampler", function.__name__, section_from_signature(function, CustomSampler))
    return function


order = sampler  # its former name


class CustomSampler(WeightedSampler):
    """P(task) proportional to the weights of a user's function, whose options are further keys."""

    sees_sequence: ClassVar[bool] = True

    _step: int = PrivateAttr()

    def next(self, step: int = 0) -> Task:
        self._step = step
        return super().next(step)

    def _weights(self) -> Floats:
        function = type(self).function
        assert function is not None
        known = CustomSampler.model_fields.keys()
        options = {key: value for key, value in self.arguments().items() if key not in known}
        view = TaskView(self._taskset.tasks, self._success.rates(), self._success.groups.copy(), self._step)
        name = f"taskset.sampler `{self.name}`"
        try:
            weights: Floats = np.asarray(function(view, **options), np.float64)
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            place = user_code_location(error)
            where = f" at {place}" if place else ""
            raise TasksetError(f"{name} raised {type(error).__name__}: {error}{where}; correct it") from error
        if weights.shape != (self._size,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise TasksetError(
                f"{name}: expected {self._size} weights of at least 0, one per task and not all 0, found an array of "
                f"shape {list(weights.shape)}"
                + (f" from {weights.min():g} to {weights.max():g}" if weights.size else "")
            )
        return weights
