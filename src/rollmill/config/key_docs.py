"""Describes keys of the run file: their values, defaults and meaning."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.field_docs import document_sections
from rollmill.config.section import Section
from rollmill.config.validation_errors import section_classes, unwrap_annotation

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def describe_value(field: FieldInfo) -> str:
    """Returns the type of a key and its bounds, in Markdown."""
    annotation, optional = unwrap_annotation(field.annotation), type(None) in get_args(field.annotation)
    bounds = [
        f"{word} {getattr(rule, name):.15g}"
        for rule in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    return ", ".join([_type(annotation), *bounds]) + (" or null" if optional else "")


def _type(annotation: Any) -> str:
    annotation = unwrap_annotation(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return "list of sections" if section_classes(arguments[0]) else f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments)}]"
    if origin is dict:
        return "mapping"
    if section_classes(annotation):
        return "section"
    if arguments:
        return " or ".join(_type(argument) for argument in arguments)
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}[annotation]


def describe_default(field: FieldInfo) -> str:
    """Returns the default of a key, in Markdown; `required` without one."""
    if field.is_required():
        return "required"
    return _written(field.default)


def _written(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(each, Section) for each in value):
        return f"`[{', '.join(_written(each).strip('`') for each in value)}]`"
    if isinstance(value, Section):
        plain = type(value).model_validate({"name": value.name} if hasattr(value, "name") else {})
        own = "".join(
            f", {key}: {json.dumps(each)}"
            for key, each in value.model_dump(mode="json").items()
            if key != "name" and each != plain.model_dump(mode="json")[key]
        )
        if hasattr(value, "name"):
            return f"`{{name: {value.name}{own}}}`"
        return f"`{{{own[2:]}}}`" if own else "its defaults"
    if isinstance(value, Enum | Path):
        value = str(value)
    return _code(
        value if isinstance(value, str) and not _needs_quotes(value) else json.dumps(value, ensure_ascii=False)
    )


def _needs_quotes(text: str) -> bool:
    """True if a text is shown as YAML would hold it in quotes: empty, with space around it, or of several lines."""
    return text != text.strip() or not text.isprintable() or not text


def _code(text: str) -> str:
    """Text as code in one line of Markdown, whatever backticks it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " * (text[:1] == "`" or text[-1:] == "`")
    return f"{fence}{space}{text}{space}{fence}"


def describe_meaning(key: str, field: FieldInfo) -> str:
    """Returns the documentation of a key on one line."""
    document_sections()
    inner = unwrap_annotation(field.annotation)
    sections = section_classes(get_args(inner)[0] if get_origin(inner) is list else inner)
    if field.description:
        return join_lines(field.description)
    if len(sections) == 1:
        return join_lines(sections[0].__doc__)
    if key in PolicyGradientOptions.model_fields and key != "name":  # a key that an algorithm gives another default
        return join_lines(PolicyGradientOptions.model_fields[key].description)
    if sections:
        return f"One section per `name`: docs/run-file/{key}.md lists them."
    return {"name": "Name of the run (of the stage, inside `stages`)."}[key]


def join_lines(text: str | None) -> str:
    """Returns a docstring on one line."""
    assert text, "every section and key of the configuration has a docstring"
    return " ".join(text.split())
