"""The table reward: F1 of cells."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rollmill.config.rewards import TableReward
from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import select_text
from rollmill.rewards.vision.figures import parse_chart_number, within_tolerance
from rollmill.rewards.vision.table_reading import MAX_CELLS, Rows, read_table, reference_table
from rollmill.types import Completion, Task

_LONGEST = 100_000
Cells = dict[tuple[str, str], str]


class TableScorer:
    """2 * right cells / (cells of the reference + cells written), from 0 to 1.

    Outcomes besides ok: `no_answer`, `no_table`, `too_long`, `too_many`.
    """

    def __init__(self, config: TableReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Score(None)
        return await asyncio.to_thread(_verdict, task.answer, select_text(completion.text, config), config.tolerance)


def _verdict(answer: Any, text: str | None, tolerance: float) -> Score:
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
    """(first cell of the row, heading of the column) -> cell, without empty ones. The order of both does not matter.

    A second row or column of the same name is told apart by its number. In a table of one column rows go by number.
    """
    if not rows:
        return {}
    headings = _told_apart([_folded(cell) for cell in rows[0]])
    narrow = len(headings) == 1
    names = _told_apart(
        [str(number) if narrow else _folded(row[0]) if row else "" for number, row in enumerate(rows[1:])]
    )
    return {
        (name, heading): cell
        for name, row in zip(names, rows[1:], strict=True)
        for heading, cell in list(zip(headings, row, strict=False))[0 if narrow else 1 :]
        if cell.strip()
    }


def _told_apart(names: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def cells_match(gold: str, cell: str, tolerance: float) -> bool:
    """Whether two cells are the same number, or the same text but for case, spaces and Markdown."""
    one, other = parse_chart_number(_folded(gold)), parse_chart_number(_folded(cell))
    if one is None or other is None:
        return _folded(gold) == _folded(cell)
    return one.percent == other.percent and within_tolerance(one.value, other.value, tolerance)


def _folded(cell: str) -> str:
    return " ".join(cell.replace("*", "").replace("`", "").casefold().split())
