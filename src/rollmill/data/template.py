"""Plain templates: text with `{column}` fields. No expressions, attributes, indexing or format codes."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from rollmill.data.readers import BadRowError, check_finite
from rollmill.errors import TasksetError


class PromptTemplate:
    """A parsed template; `{{` and `}}` are literal braces. Values are inserted unchanged, braces included.

    Raises:
        TasksetError: the template is invalid; the message names `key`.
    """

    def __init__(self, text: str, key: str) -> None:
        self._key = key
        try:
            self._parts = [self._part(*part) for part in string.Formatter().parse(text)]
        except ValueError as error:
            raise TasksetError(f"{key}: {error}; write {{column}} for a column, {{{{ and }}}} for braces") from error
        if not self.columns:
            raise TasksetError(
                f"{key} names no column, so every task would be the same; write {{column}} where it goes"
            )

    @property
    def columns(self) -> list[str]:
        """Columns used by the template."""
        return [column for _, column in self._parts if column is not None]

    def fill(self, row: Mapping[str, Any]) -> str:
        """Fill the template with one row. Raises BadRowError if a column is missing or is not text or a number."""
        return "".join(
            before + (self._value(row, column) if column is not None else "") for before, column in self._parts
        )

    def _part(self, before: str, name: str | None, code: str | None, conversion: str | None) -> tuple[str, str | None]:
        if name is None:
            return before, None
        if not name:
            raise ValueError("{} names no column")
        if code or conversion:
            raise ValueError(f"{{{name}}} has a format code, which templates do not support")
        if any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} reaches into a column, which templates do not support")
        return before, name

    def _value(self, row: Mapping[str, Any], column: str) -> str:
        if column not in row:
            raise BadRowError(f"{self._key} names {{{column}}}, but the columns are {', '.join(row)}")
        value = row[column]
        if not isinstance(value, str | int | float):
            raise BadRowError(f"{self._key}: column {column} is {describe_type(value)}, not text or a number")
        check_finite(value, f"{self._key}: column {column}")
        return str(value)


def describe_type(value: Any) -> str:
    """Describe the type of a value for error messages."""
    if value is None:
        return "empty (null)"
    words = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return words.get(type(value), f"a {type(value).__name__}")
