"""The decorator that makes a user's function or class an operator of run files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rollmill.config.operators.base import OperatorSection
from rollmill.config.parts import register_section, section_from_signature, source_location
from rollmill.errors import ConfigError

Target = TypeVar("Target", bound=Callable[..., Any])


def operator(target: Target) -> Target:
    """Register an operator under its name: `pipeline: [{name: NAME, ...}]`.

    A function takes one `rollmill.pipelines.Batch` and returns nothing; it may be `async`. A class is made once per
    stage and called with batches; `state_dict` and `load_state_dict`, where it has them, put what it remembers into
    checkpoints. Keyword-only parameters (of the function, or of `__init__`) with a type and a default are keys of the
    run file.

    Raises ConfigError naming file and line: a parameter lacks a type or a default, or the operator cannot be called
    with a batch.
    """
    _check_calls(target)
    register_section("pipeline", target.__name__, section_from_signature(target, OperatorSection))
    return target


def build_custom_operator(section: OperatorSection) -> Any:
    """The operator of a registered section."""
    target = type(section).function
    assert target is not None
    options = section.arguments()
    return target(**options) if inspect.isclass(target) else partial(target, **options)


def _check_calls(target: Callable[..., Any]) -> None:
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isclass(target):
        _check_takes(inspect.signature(target), 1, f"{where}: an operator takes one batch, as in def NAME(batch)")
        return
    _check_takes(inspect.signature(target), 0, f"{where}: options of an operator stand behind `*` in __init__")
    if "__call__" not in dir(target) or not inspect.isfunction(target.__call__):
        raise ConfigError(f"{where}: an operator needs a method __call__(self, batch)")
    signature = inspect.signature(target.__call__)
    _check_takes(signature, 2, f"{where}: __call__ takes one batch, as in def __call__(self, batch)")


def _check_takes(signature: inspect.Signature, count: int, otherwise: str) -> None:
    """Whether exactly so many positional arguments have to be given."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in signature.parameters.values() if each.kind in positional]
    if len(taken) != count:
        raise ConfigError(f"{otherwise}; found {signature}")
