"""Tables in Markdown, CSV and JSON as rows of text, the headings first."""

from __future__ import annotations

import csv
import re
from typing import Any

from rollmill.rewards.text.parsing import last_code_block
from rollmill.strict_files import parse_strict_json

Rows = list[list[str]]

_RULE = re.compile(r"[|:\- ]{3,2000}")
_ESCAPED = "\x00"
MAX_CELLS = 10_000
"""Larger tables are none."""


def read_table(text: str) -> Rows | None:
    """The last Markdown table of a text; else its last fenced block, or all of it, as JSON or CSV. None for none."""
    markdown = _markdown(text)
    if markdown is not None:
        return markdown
    block = last_code_block(text) or text
    try:
        return _rows(parse_strict_json(block))
    except ValueError:
        return _csv(block)


def reference_table(answer: Any) -> Rows:
    """The table of a task's answer: text as above, a list of rows, or a list of objects. Raises ValueError."""
    rows = read_table(answer) if isinstance(answer, str) else _rows(answer)
    if rows is None or len(rows) < 2:
        raise ValueError(
            f"the task's answer is {answer!r:.80}; expected a table with headings: Markdown, CSV, a list of rows or a "
            "list of objects"
        )
    if sum(map(len, rows)) > MAX_CELLS:
        raise ValueError(f"the task's answer is a table of more than {MAX_CELLS} cells; leave out rows or columns")
    return rows


def _markdown(text: str) -> Rows | None:
    lines = text.split("\n")
    rules = [
        number
        for number, line in enumerate(lines)
        if number and "-" in line and "|" in line and _RULE.fullmatch(line.strip()) and "|" in lines[number - 1]
    ]
    if not rules:
        return None
    start = rules[-1]
    end = next((number for number in range(start + 1, len(lines)) if "|" not in lines[number]), len(lines))
    return [_cells(line) for line in (lines[start - 1], *lines[start + 1 : end])]


def _cells(line: str) -> list[str]:
    line = line.strip().replace(r"\|", _ESCAPED)
    parts = line.removeprefix("|").removesuffix("|").split("|")
    return [part.strip().replace(_ESCAPED, "|") for part in parts]


def _rows(value: Any) -> Rows | None:
    """Rows of {"columns": [...], "rows" or "data": [[...]]}, of a list of objects, or of a list of lists."""
    if isinstance(value, dict):
        body = value.get("rows", value.get("data"))
        if not isinstance(body, list) or not isinstance(value.get("columns"), list):
            return None
        value = [value["columns"], *body]
    if not isinstance(value, list | tuple) or not value:
        return None
    if all(isinstance(row, dict) for row in value):
        columns = list(dict.fromkeys(str(key) for row in value for key in row))
        if len(columns) * len(value) > MAX_CELLS:
            return None
        return [columns, *([_text(row.get(column)) for column in columns] for row in value)]
    if all(isinstance(row, list | tuple) for row in value):
        return [[_text(cell) for cell in row] for row in value]
    return None


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _csv(text: str) -> Rows | None:
    """Rows of lines with as many commas, tabs or semicolons as the first; at least two columns and two rows."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    if len(lines) < 2:
        return None
    delimiter = max("\t;,", key=lambda each: (lines[0].count(each), each == ","))
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter, strict=True)]
    except csv.Error:
        return None
    return rows if len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows) else None
