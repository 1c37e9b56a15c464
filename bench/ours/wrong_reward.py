"""A reward that is inverted for a fifth of all completions, always the same ones."""

from __future__ import annotations

from typing import Any
from zlib import crc32


def wrong_in_a_fifth(task: Any, completion: Any) -> float:
    """1 for the right sum after `#`, else 0; inverted where the hash of task and text is a multiple of 5."""
    _, mark, answer = completion.text.rpartition("#")
    right = bool(mark) and answer.strip() == str(task.answer)
    wrong = crc32(f"{task.id}:{completion.text}".encode()) % 5 == 0
    return float(right != wrong)
