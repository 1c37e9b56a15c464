"""The decorator that makes a user's function or class an operator of run files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rollmill.config.operators.base import OperatorSection
from rollmill.config.parts import part_of, register

Target = TypeVar("Target", bound=Callable[..., Any])


def operator(target: Target) -> Target:
    """Register an operator under its name: `pipeline: [{name: NAME, ...}]`.

    A function takes one `rollmill.pipelines.Batch` and returns nothing; it may be `async`. A class is made once per
    stage and called with batches; `state_dict` and `load_state_dict`, where it has them, put what it remembers into
    checkpoints. Keyword-only parameters (of the function, or of `__init__`) with a type and a default are keys of the
    run file.

    Raises ConfigError naming the parameter that lacks a type or a default.
    """
    register("operator", target.__name__, part_of(target, OperatorSection))
    return target


def made(section: OperatorSection) -> Any:
    """The operator of a registered section."""
    target = type(section).function
    assert target is not None
    options = section.arguments()
    return target(**options) if inspect.isclass(target) else partial(target, **options)
