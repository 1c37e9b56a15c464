"""Writes generated files, or with `--check` only compares them; the scripts beside it use it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_or_check(made: Iterable[tuple[Path, str]], script: str, arguments: Sequence[str]) -> int:
    """Write every file that differs; returns the exit code.

    With `--check` nothing is written: such files are named on stderr, and the code is 1.
    """
    stale = [(path, text) for path, text in made if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path, _ in stale:
            print(f"{path} is out of date; run: python docs/{script}", file=sys.stderr)
        return int(bool(stale))
    for path, text in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0
