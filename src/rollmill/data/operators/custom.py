"""The decorator that makes a user's function an operator of `taskset.pipeline`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rollmill.config.parts import register_section, section_from_signature
from rollmill.config.task_operators import TaskOperatorSection

Function = TypeVar("Function", bound=Callable[..., Any])


def task_operator(function: Function) -> Function:
    """Register a task operator under its name: `taskset: {pipeline: [{name: NAME, ...}]}`.

    The function takes one `rollmill.data.operators.TaskBatch` and returns nothing. It has to do the same every time,
    because a resumed run calls it again. Keyword-only parameters with a type and a default are keys of the run file.

    Raises ConfigError naming the parameter that lacks a type or a default.
    """
    register_section("task_operator", function.__name__, section_from_signature(function, TaskOperatorSection))
    return function


def build_custom_task_operator(section: TaskOperatorSection) -> Callable[..., Any]:
    """The operator of a registered section."""
    function = type(section).function
    assert function is not None
    return partial(function, **section.arguments())
