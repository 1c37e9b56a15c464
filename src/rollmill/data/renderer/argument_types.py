"""Types of a tool's arguments, for formats of calls that write values without quotes: `<parameter=city>Paris`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_PYTHON = {"T": "boolean", "F": "boolean", "N": "null", "[": "array", "{": "object"}
"""Types by the first letter of a value in Python's notation; texts and numbers need none."""
_DEEPEST = 8  #: a schema may refer to itself


def with_plain_types(tools: Any) -> list[dict[str, Any]]:
    """Tools whose arguments have a type, or several ones below `anyOf`: the library knows no other schemas.

    An argument whose schema names no type may be anything, texts included.
    """
    found = []
    for tool in tools:
        function = tool.get("function", tool)
        properties = {
            name: {"type": types[0]} if len(types) == 1 else {"anyOf": [{"type": each} for each in types]}
            for name, types in _argument_types(function).items()
        }
        parameters = {"type": "object", "properties": properties}
        found.append({"type": "function", "function": {"name": function["name"], "parameters": parameters}})
    return found


def read_values(arguments: Mapping[str, Any], name: str, tools: Any) -> tuple[dict[str, Any], bool]:
    """Read values in Python's notation where the tool's schema allows what they are: templates write True and ['a'].

    Returns:
        The arguments, and whether the schema allows a text for each of them that is one. An unknown tool allows any.
    """
    named = [each.get("function", each) for each in tools or ()]
    types = next((_argument_types(each) for each in named if each["name"] == name), {})
    found = dict(arguments)
    for key, value in arguments.items():
        text = value.strip() if isinstance(value, str) else ""
        if text[:1] in _PYTHON and _PYTHON[text[0]] in types.get(key, ()):
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                read = ast.literal_eval(text)
                if json.loads(json.dumps(read, allow_nan=False)) == read:
                    found[key] = read
    allowed = all("string" in types.get(key, _ANY) for key, value in found.items() if isinstance(value, str))
    return found, allowed


def _argument_types(function: Mapping[str, Any]) -> dict[str, list[str]]:
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {name: sorted(_types(schema, parameters)) or _ANY for name, schema in properties.items()}


_ANY = ["array", "boolean", "null", "number", "object", "string"]


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types of JSON that a schema names; none if it names no type.

    Args:
        root: the schema in which references are looked up.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return set()
    if isinstance(schema.get("$ref"), str):
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    given = schema.get("type")
    if given:
        return {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if values:
        return {_NAMES.get(type(each), "null") for each in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            several = [_types(each, root, depth + 1) for each in schema[key]]
            return set[str]().union(*several) if all(several) or key == "allOf" else set()
    return set()
