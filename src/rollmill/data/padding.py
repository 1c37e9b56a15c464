"""Tells the nulls of a table that mean a missing key from those that somebody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCHES = "chat_template_kwargs"
"""Column, and metadata of a task: values for the chat template, such as `enable_thinking`."""
_MARKS = (
    {"role", "content"},
    {"role", "tool_calls"},
    {"function"},
    {"name", "arguments"},
    {"name", "parameters"},
)
"""Keys by which a message, a tool or a call is known."""


def without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the nulls by which a table fills in keys that only other rows have: from messages, tools, calls, JSON
    Schemas and switches of the chat template, at any depth.

    In a table (Parquet, `datasets`) all structs of a column have the same keys. Lists are not padded and keep their
    nulls, and so do all other columns.
    """
    return {column: _filled(each) if column == SWITCHES else _cleaned(each) for column, each in row.items()}


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        if any(marks <= value.keys() for marks in _MARKS) or _is_schema(value):
            return _filled(value)
        return {key: _cleaned(each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        return [_cleaned(each) for each in value]
    return value


def _is_schema(value: Mapping[str, Any]) -> bool:
    return (
        isinstance(value.get("properties"), Mapping) or value.get("type") in ("object", "array") or "$schema" in value
    )


def _filled(value: Any) -> Any:
    """Returns the value without the keys that are null."""
    if isinstance(value, Mapping):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value
