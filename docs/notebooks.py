"""Writes the notebooks of examples/notebooks from the scripts beside them, without outputs; `--check` only compares.

A script has cells between lines `# %%`; a cell that begins with `# %% [markdown]` is text, in comments.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from generated_files import write_or_check

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook(script: str) -> str:
    """Returns the notebook of a script, as JSON."""
    _, *parts = _CELL.split(script)
    cells = [_cell(number, bool(kind), text.strip("\n")) for number, (kind, text) in enumerate(_pairs(parts))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _cell(number: int, is_text: bool, text: str) -> dict[str, Any]:
    if is_text:
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    cell: dict[str, Any] = {
        "cell_type": "markdown" if is_text else "code",
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    return cell if is_text else {**cell, "execution_count": None, "outputs": []}


def main() -> int:
    """Writes or compares the notebooks; returns the exit code."""
    scripts = sorted(FOLDER.glob("*.py"))
    made = [(script.with_suffix(".ipynb"), notebook(script.read_text(encoding="utf-8"))) for script in scripts]
    return write_or_check(made, "notebooks.py", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
