"""Binds algorithm functions to the trainer's inputs by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from rollmill.algorithms.recipe import AdvantageInputs, LossInputs, MaskInputs
from rollmill.config.algorithms.base import AdvantageSection, LossSection, MaskSection
from rollmill.config.algorithms.corrections import CorrectionSection
from rollmill.config.section import NamedSection
from rollmill.errors import ConfigError
from rollmill.registry import import_object


def bind_advantage(part: AdvantageSection) -> Callable[[AdvantageInputs], Tensor]:
    """Binds the advantage function that the section names to AdvantageInputs."""
    return bind_inputs(_function(part), part, AdvantageInputs._fields)


def bind_loss(part: LossSection) -> Callable[[LossInputs], Tensor]:
    """Binds the loss function that the section names to LossInputs."""
    return bind_inputs(_function(part), part, LossInputs._fields)


def bind_mask(part: MaskSection) -> Callable[[MaskInputs], Tensor]:
    """Binds the mask that the section names; it returns the tokens to keep."""
    return bind_inputs(_function(part), part, MaskInputs._fields)


def bind_selection(part: LossSection) -> Callable[[MaskInputs], Tensor] | None:
    """Binds the loss's selection over a whole optimizer step, if it has one."""
    return bind_inputs(import_object(part.selection), part, MaskInputs._fields) if part.selection else None


def bind_clip_indicator(part: LossSection) -> Callable[[LossInputs | MaskInputs], Tensor] | None:
    """Binds the function that returns the tokens dropped by the loss, if it has one."""
    return bind_inputs(import_object(part.clip_indicator), part, LossInputs._fields) if part.clip_indicator else None


def bind_correction(part: CorrectionSection) -> Callable[[LossInputs], Tensor]:
    """Binds the off-policy correction that the section names."""
    return bind_inputs(_function(part), part, LossInputs._fields)


def bind_options(part: NamedSection) -> Callable[..., Any]:
    """Binds the section's options to the function that it names; the inputs stay positional."""
    return partial(_function(part), **part.arguments())


def _function(part: NamedSection) -> Callable[..., Any]:
    function: Callable[..., Any] = part.function or import_object(part.implementation)
    return function


def bind_inputs(
    function: Callable[..., Tensor], part: NamedSection, fields: tuple[str, ...]
) -> Callable[[Any], Tensor]:
    """Binds `function`, with the section's options, to a named tuple whose fields are its positional parameters.

    A function with a single parameter that is not a field gets the whole tuple.

    Raises:
        ConfigError: one of several parameters is not a field.
    """
    names, accepted = _parameters(function)
    options = {key: value for key, value in part.arguments().items() if key in accepted}
    names = tuple(name for name in names if name not in options)
    if len(names) == 1 and names[0] not in fields:
        return lambda inputs: function(inputs, **options)
    for name in names:
        if name not in fields:
            where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
            advice = f"rename it to one of {', '.join(fields)}, or make it keyword-only with a default: an option"
            raise ConfigError(f"{where}: the parameter `{name}` stands for nothing; {advice}")
    return lambda inputs: function(*(getattr(inputs, name) for name in names), **options)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the parameters without a default, and of all parameters."""
    parameters = inspect.signature(function).parameters.values()
    required = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    return required, frozenset(p.name for p in parameters)
