"""Decorators that register a user's function or class as an algorithm, a loss or an advantage for run files."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError, create_model

from rollmill.config.advantage import AdvantageSection
from rollmill.config.algorithm import AlgorithmOptions, PolicyGradientOptions
from rollmill.config.loss import LossSection
from rollmill.config.section import NamedSection, register_section, section_from_signature
from rollmill.errors import ConfigError
from rollmill.recipes import known_algorithms

Function = TypeVar("Function", bound=Callable[..., Any])
Target = TypeVar("Target", bound=Callable[..., Any] | type[AlgorithmOptions])


def loss(function: Function) -> Function:
    """Registers a per-token loss under its name: `algorithm: {name: grpo, loss: NAME}`.

    The function takes one `rollmill.algorithms.LossInputs` (or parameters named like its fields) and returns a term per
    token, [tokens], to be minimised. Keyword-only parameters with a type and a default are keys of the run file.
    """
    register_section("loss", function.__name__, _loss_part(function))
    return function


def advantage(function: Function) -> Function:
    """Registers an advantage under its name: `algorithm: {name: grpo, advantage: NAME}`.

    The function takes one `rollmill.algorithms.AdvantageInputs` (or parameters named like its fields, such as `rewards`
    and `groups`) and returns one advantage per experience, [N]. Options as for `loss`. A rollout with several
    experiences counts as one of N, unless there is a parameter `episodes`.
    """
    section: Any = section_from_signature(function, AdvantageSection)
    section.uses_episodes = "episodes" in inspect.signature(function).parameters
    register_section("advantage", function.__name__, section)
    return function


def algorithm(target: Target | None = None, *, base: str = "grpo", **defaults: Any) -> Any:
    """Registers an algorithm under its name: `algorithm: {name: NAME}`.

    On a function: the algorithm `base` with the function as its per-token loss (see `loss`); `defaults` are other keys
    of the section `algorithm`, such as `aggregation="token-mean"` or `kl=0.1`. On a class: a subclass of one of
    `rollmill.recipes`.

    Raises:
        ConfigError: `base` or one of `defaults` is unknown.
    """
    if target is None:
        return lambda decorated: algorithm(decorated, base=base, **defaults)
    if inspect.isclass(target):
        section: Any = target
        register_section("algorithm", str(section.model_fields["name"].default), section)
        return target
    part: Any = _loss_part(target)
    register_section("loss", target.__name__, part)
    register_section("algorithm", target.__name__, _derive_algorithm(target, base, {**defaults, "loss": part()}))
    return target


def _loss_part(function: Callable[..., Any]) -> type[NamedSection]:
    """Builds the section of a user's loss, which may have a gradient where the advantage is 0."""
    return section_from_signature(function, _UserLoss)


class _UserLoss(LossSection):
    follows_advantage: ClassVar[bool] = False


def _derive_algorithm(function: Callable[..., Any], base: str, defaults: dict[str, Any]) -> type[AlgorithmOptions]:
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
    known = known_algorithms()
    parent = known.get(base)
    if parent is None or not issubclass(parent, PolicyGradientOptions):
        near = get_close_matches(base, list(known), n=1)
        hint = f"; did you mean `{near[0]}`?" if near and near[0] != base else ""
        raise ConfigError(f"{where}: base `{base}` is no algorithm that rolls out{hint}; see `rollmill algorithms`")
    try:
        values = parent.model_validate(defaults)
    except ValidationError as error:
        key, text = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise ConfigError(f"{where}: {key}: {text}; correct the decorator's arguments") from error
    fields: dict[str, Any] = {}
    for key in defaults:
        field = copy.copy(parent.model_fields[key])
        field.default = getattr(values, key)
        fields[key] = (field.annotation, field)
    name = function.__name__
    doc = inspect.getdoc(function) or f"`{base}` with the loss `{name}`."
    fields["name"] = (Literal[name], name)
    create: Any = create_model
    created: Any = create(name, __base__=parent, __doc__=doc, **fields)
    created.source = inspect.getsourcefile(function) or ""
    section: type[AlgorithmOptions] = created
    return section
