"""Labelled completions as chat models write them: workings, remarks, breakdowns, answers in words.

Someone who had not read the extractor wrote them. It has been mended by them since, so they are no unseen texts any
more. In `chat_answers.jsonl` each line is a completion, its reference and whether it is right.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.answer_corpus import Labelled

PREFIX = "chat: "
"""Begins the group of each of these completions."""


def chat_answers() -> list[Labelled]:
    """All of them, in the order of the file."""
    lines = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Labelled(**{**row, "group": PREFIX + row["group"]}) for row in rows]
