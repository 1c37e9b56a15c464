"""The table reward: F1 of cells."""

from __future__ import annotations

import csv
import re
from collections import Counter
from typing import Any, Literal

from pydantic import Field

from rollmill.files import parse_strict_json
from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import last_code_block
from rollmill.rewards.vision.base import VisionReward
from rollmill.types import Completion, Task

# Parses tables in Markdown, CSV and JSON into rows of text, headings first.

Rows = list[list[str]]

_RULE = re.compile(r"[|:\- ]{3,2000}")
_ESCAPED = "\x00"
MAX_CELLS = 10_000
"""Larger tables are rejected."""


def read_table(text: str) -> Rows | None:
    """Return the last Markdown table of a text; else its last fenced block, or all of it, as JSON or CSV; else None."""
    markdown = _markdown(text)
    if markdown is not None:
        return markdown
    block = last_code_block(text) or text
    try:
        return _rows(parse_strict_json(block))
    except ValueError:
        return _csv(block)


def reference_table(answer: Any) -> Rows:
    """Return the table of a task's answer: text as in `read_table`, a list of rows, or a list of objects.

    Raises ValueError.
    """
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
    """Return the rows of {"columns": [...], "rows" or "data": [[...]]}, of a list of objects, or of a list of lists."""
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
    """Return rows with as many commas, tabs or semicolons as the first line; at least two columns and two rows."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    if len(lines) < 2:
        return None
    delimiter = max("\t;,", key=lambda each: (lines[0].count(each), each == ","))
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter, strict=True)]
    except csv.Error:
        return None
    return rows if len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows) else None


_LONGEST = 100_000
Cells = dict[tuple[str, str], str]


class TableReward(VisionReward):
    """F1 of table cells, each identified by its row's first cell and its column's heading. Markdown, CSV or JSON."""

    decides = True
    largest = 1.0
    name: Literal["table"]
    tolerance: float = Field(0.0, ge=0, lt=1)
    """Accepted relative error of numbers."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 2 * right cells / (reference cells + predicted cells), from 0 to 1.

        Outcomes besides ok: `no_answer`, `no_table`, `too_long`, `too_many`.
        """
        import asyncio

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        return await asyncio.to_thread(_score, task.answer, options.select_answer(completion), options.tolerance)


def _score(answer: Any, text: str | None, tolerance: float) -> Score:
    golds = table_cells(reference_table(answer))
    if not golds:
        raise ValueError("the task's answer is a table whose cells are all empty; give it some, or remove the task")
    if text is None:
        return Score(0.0, "no_answer")
    if len(text) > _LONGEST:
        return Score(0.0, "too_long")
    rows = read_table(text)
    if rows is None:
        return Score(0.0, "no_table")
    if sum(map(len, rows)) > MAX_CELLS:
        return Score(0.0, "too_many")
    written = table_cells(rows)
    right = sum(key in written and cells_match(gold, written[key], tolerance) for key, gold in golds.items())
    return Score(2 * right / (len(golds) + len(written)))


def table_cells(rows: Rows) -> Cells:
    """Return (first cell of the row, heading of the column) -> cell, without empty ones. Order does not matter.

    A second row or column of the same name gets a number. In a table of one column rows are numbered.
    """
    if not rows:
        return {}
    headings = _unique_names([_folded(cell) for cell in rows[0]])
    narrow = len(headings) == 1
    names = _unique_names(
        [str(number) if narrow else _folded(row[0]) if row else "" for number, row in enumerate(rows[1:])]
    )
    return {
        (name, heading): cell
        for name, row in zip(names, rows[1:], strict=True)
        for heading, cell in list(zip(headings, row, strict=False))[0 if narrow else 1 :]
        if cell.strip()
    }


def _unique_names(names: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def cells_match(gold: str, cell: str, tolerance: float) -> bool:
    """True if two cells are the same number, or the same text up to case, spaces and Markdown."""
    from rollmill.rewards.vision.numbers import parse_chart_number, within_tolerance

    one, other = parse_chart_number(_folded(gold)), parse_chart_number(_folded(cell))
    if one is None or other is None:
        return _folded(gold) == _folded(cell)
    return one.percent == other.percent and within_tolerance(one.value, other.value, tolerance)


def _folded(cell: str) -> str:
    return " ".join(cell.replace("*", "").replace("`", "").casefold().split())
