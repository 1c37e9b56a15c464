"""Labelled completions as chat models write them: workings, remarks, breakdowns, answers in words.

They were written without knowledge of the extractor. The extractor was fixed with them since, so they are no longer
unseen. Each line of `chat_answers.jsonl` is a completion, its reference and whether it is right.
"""

from __future__ import annotations

import json
from pathlib import Path

from grading_bench.answer_corpus import Labelled

PREFIX = "chat: "
"""Prefix of the groups of these completions."""


def chat_answers() -> list[Labelled]:
    """Read all completions, in the order of the file."""
    lines = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Labelled(**{**row, "group": PREFIX + row["group"]}) for row in rows]
