"""Validation errors in words: where the value was written, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollmill.config.hints import (
    closest_match,
    explain_unknown_key,
    join_quoted,
    section_classes,
    section_tag,
    suggest_match,
    unwrap_annotation,
)
from rollmill.config.parts import registered_sections
from rollmill.config.section import Section
from rollmill.config.tree import ConfigProblem, KeyPath, Node, locate_key, truncate_text

_EXPECTED: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("int_", lambda ctx: "a whole number"),
    ("float_", lambda ctx: "a number"),
    ("finite_number", lambda ctx: "a finite number"),
    ("bool_", lambda ctx: "true or false"),
    ("string_", lambda ctx: "text"),
    ("path_", lambda ctx: "a path"),
    ("list_type", lambda ctx: "a list"),
    ("tuple_type", lambda ctx: "a list"),
    ("too_long", lambda ctx: f"at most {ctx['max_length']} entries"),
    ("model_", lambda ctx: "a section (`key: value` lines)"),
    ("dict_type", lambda ctx: "a section (`key: value` lines)"),
    ("greater_than_equal", lambda ctx: f"at least {ctx['ge']:g}"),
    ("greater_than", lambda ctx: f"more than {ctx['gt']:g}"),
    ("less_than_equal", lambda ctx: f"at most {ctx['le']:g}"),
    ("less_than", lambda ctx: f"less than {ctx['lt']:g}"),
]


def explain_validation_error(
    error: ValidationError, model: type[Section], tree: Node, skip: Collection[str] = ()
) -> list[ConfigProblem]:
    """One problem per wrong value, located in the files it came from.

    `tree` is what `model` was validated with; errors under the top-level keys `skip` are left to another caller.
    """
    by_path: dict[KeyPath, list[tuple[ErrorDetails, type[Section]]]] = {}
    for details in error.errors(include_url=False):
        path, owner = _walk(model, details["loc"])
        if path and path[0] in skip:
            continue
        by_path.setdefault(path, []).append((details, owner))
    problems = []
    for path, found in by_path.items():
        details, owner = found[0]
        if details["type"].startswith("union_tag"):
            path = (*path, "name")
        place, key = locate_key(tree, path)
        text = _text(details, owner, path) if len(found) == 1 else _expected([one for one, _ in found])
        problems.append(ConfigProblem(place, key, text))
    return problems


def _walk(model: type[Section], loc: tuple[int | str, ...]) -> tuple[KeyPath, type[Section]]:
    """The key path without the labels of unions, and the section class of its last key."""
    path: list[int | str] = []
    owner, spot = model, model
    for segment in loc:
        if segment == "[key]":  # pydantic's mark of an entry's name
            break
        sections, inner = section_classes(spot), unwrap_annotation(spot)
        if len(sections) > 1:
            kind = _kind(tuple(path))
            owner = spot = next(
                each for each in [*sections, *registered_sections(kind)] if section_tag(each) == segment
            )
        elif sections:
            owner = sections[0]
            path.append(segment)
            field = owner.model_fields.get(str(segment))
            spot = field.annotation if field else None  # type: ignore[assignment]
        elif get_origin(inner) in (list, tuple, dict):
            path.append(segment)
            spot = get_args(inner)[1 if get_origin(inner) is dict else 0]
    return tuple(path), owner


def _kind(path: KeyPath) -> str:
    """What users' parts that stand at `path` are registered as."""
    keys = [key for key in path if isinstance(key, str)]
    return "task_operator" if keys[-1] == "pipeline" and len(keys) > 1 else keys[-1]


def _text(details: ErrorDetails, owner: type[Section], path: KeyPath) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return explain_unknown_key(str(path[-1]), owner)
    if kind == "missing":
        field = owner.model_fields.get(str(path[-1]))
        return f"is required; {field.description or 'add it'}" if field else "is required; the list is too short"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        return "is required; it says which component the other keys are for"
    if kind == "union_tag_invalid":
        users = [section_tag(each) for each in registered_sections(_kind(path[:-1]))]
        return _unknown_name(str(context["tag"]), str(context["expected_tags"]), users)
    return _expected([details])


def _unknown_name(name: str, expected: str, users: list[str]) -> str:
    names = [*re.findall(r"'([^']*)'", expected), *users]
    return f"`{truncate_text(name)}` is not known{suggest_match(name, names) or ';'} valid: {', '.join(names)}"


def _expected(errors: list[ErrorDetails]) -> str:
    value = errors[0]["input"]
    wanted, near = [], None
    for details in errors:
        if details["type"] == "literal_error":
            choices = re.findall(r"'([^']*)'", details["ctx"]["expected"])
            wanted.append(_either(choices) if choices else details["ctx"]["expected"])
            near = near or (closest_match(value, choices) if isinstance(value, str) else None)
        else:
            wanted.append(_expectation(details))
    return f"expected {' or '.join(wanted)}, found {_found(value)}" + (f"; did you mean `{near}`?" if near else "")


def _either(choices: list[str]) -> str:
    return join_quoted(choices) if len(choices) == 1 else f"one of {', '.join(f'`{choice}`' for choice in choices)}"


def _expectation(details: ErrorDetails) -> str:
    for prefix, words in _EXPECTED:
        if details["type"].startswith(prefix):
            return words(details.get("ctx", {}))
    return details["msg"].removeprefix("Input should be ")


def _found(value: Any) -> str:
    if value is None:
        return "nothing (remove the key to get its default)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"`{str(value).lower() if isinstance(value, bool) else truncate_text(str(value))}`"
