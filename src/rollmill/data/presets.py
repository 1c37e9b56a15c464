"""Known layouts: how published rows become prompt, answer and response columns."""

from __future__ import annotations

import re

from rollmill.data.k12_presets import K12_PRESETS
from rollmill.data.records import BadRowError, Row
from rollmill.data.template import describe_type

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_MARK = "####"


def gsm8k(row: Row) -> Row:
    """A row of GSM8K (Cobbe et al. 2021, arXiv:2110.14168): question, and as answer a solution that ends in `#### N`.

    Adds prompt (the question), answer (N without thousands separators), response (the solution with its `####` line and
    without calculator marks <<...>>) and solution (the same without the `####` line).
    """
    for column in ("question", "answer"):
        if column not in row:
            raise BadRowError(f"no column {column} (columns: {', '.join(row)})")
        if not isinstance(row[column], str):
            raise BadRowError(f"column {column} is {describe_type(row[column])}, not text")
    response = _CALCULATOR.sub("", row["answer"])
    solution, mark, answer = response.rpartition(_MARK)
    if not mark or not answer.strip():
        raise BadRowError(f"the answer has no number after {_MARK}")
    return row | {
        "prompt": row["question"],
        "answer": answer.strip().replace(",", ""),
        "response": response,
        "solution": solution.rstrip(),
    }


def humaneval(row: Row) -> Row:
    """A row of HumanEval (Chen et al. 2021, arXiv:2107.03374): prompt, entry_point, test and canonical_solution.

    Adds prefix (the prompt, which the code goes on from) and response (the solution): what the code reward and
    demonstrations need.
    """
    for column in ("task_id", "prompt", "entry_point", "test", "canonical_solution"):
        if not isinstance(row.get(column), str):
            found = (
                f"column {column} is {describe_type(row[column])}, not text" if column in row else f"no column {column}"
            )
            raise BadRowError(f"{found} (columns: {', '.join(row)})")
    return row | {"prefix": row["prompt"], "response": row["canonical_solution"]}


PRESETS = {"gsm8k": gsm8k, "humaneval": humaneval, **K12_PRESETS}
