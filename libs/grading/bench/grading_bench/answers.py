"""Real answers to grade: solutions of GSM8K and of competition problems, with the right or a neighbour's reference."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MARK = "####"
_REPOSITORY = Path(__file__).resolve().parents[4]


class MissingDataError(Exception):
    """There is no data; the message says what to do."""


def data_dir() -> Path:
    """$ROLLMILL_DATA, or shared/data beside the repository. Raises MissingDataError if it does not exist."""
    folder = Path(os.environ.get("ROLLMILL_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not (folder / "gsm8k").is_dir():
        raise MissingDataError(f"no folder {folder}/gsm8k; set ROLLMILL_DATA to a folder that has gsm8k and math")
    return folder


def pairs(count: int) -> list[tuple[str, str]]:
    """(completion, reference) pairs: four of GSM8K, then one competition problem; every other reference is wrong.

    Completions end as models end them: "The answer is N." for GSM8K, a box for the others.
    """
    gsm8k, hard = _gsm8k(), _competition()
    found = []
    for i in range(count):
        source, k = (hard, i // 5) if i % 5 == 4 else (gsm8k, i)
        text, own = source[k % len(source)]
        other = next(answer for _, answer in source[(k + 1) % len(source) :] + source if answer != own)
        found.append((text, own if i % 2 else other))
    return found


def _gsm8k() -> list[tuple[str, str]]:
    rows = _rows("gsm8k/train.jsonl")
    split = [row["answer"].rpartition(MARK) for row in rows]
    return [(f"{work.strip()}\nThe answer is {answer.strip()}.", answer.strip()) for work, _, answer in split]


def _competition() -> list[tuple[str, str]]:
    rows = [(row["question"], row["answer"]) for row in _rows("math/gaokao2023en.jsonl")]
    rows += [(row["problem"], str(row["answer"])) for row in _rows("math/aime24.jsonl")]
    answers = [(question, answer.strip().strip("$")) for question, answer in rows if answer.strip(" $")]
    return [(f"{question}\nTherefore the answer is $\\boxed{{{answer}}}$.", answer) for question, answer in answers]


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir() / name).read_text(encoding="utf-8").splitlines() if line.strip()]
