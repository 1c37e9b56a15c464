"""Oracle completions: a task's answer in the forms that rewards read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import regex

from rollmill.data.operators.builtin.deduplication import flatten_prompt, normalize_text, words
from rollmill.errors import ConfigError
from rollmill.types import Task
from rollmill_grading.extraction import extract_reference
from rollmill_grading.quantities import normalize_answer as plain_answer
from rollmill_grading.quantities import parse_quantity

_NUMBER = regex.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")
_SAID = r"(?:####|answer\s*(?:is|:|=)|\\boxed\s*\{{|<answer>)\s*\$?{answer}(?![\w]|\.\d)"


def reference_text(task: Task) -> str | None:
    """Return the reference as text; None without one.

    Of a worked solution only its last \\boxed{} or the text after "####".
    """
    answer = task.answer
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | list | tuple | Mapping):
        return str(answer)
    if isinstance(answer, list | tuple) and all(isinstance(each, str | int | float) for each in answer):
        return "; ".join(map(str, answer))
    if isinstance(answer, list | tuple | Mapping):
        return json.dumps(answer, ensure_ascii=False)
    text = str(answer)
    return extract_reference(text).strip() or None


def oracle_completions(task: Task, template: str | None) -> dict[str, str]:
    """Return form name -> completion, with the task's answer and worked solution in every form.

    Args:
        template: the only form, with {answer} and {response} in it.
    """
    answer, worked = reference_text(task), task.response
    if template is not None:
        known = {"{answer}": answer, "{response}": worked}
        if any(mark in template and value is None for mark, value in known.items()):
            return {}
        text = template
        for mark, value in known.items():
            text = text.replace(mark, value or "")
        return {"template": text}
    forms: dict[str, str] = {}
    if worked is not None:
        forms["worked"] = worked
        forms["code"] = f"```python\n{worked}\n```"
        forms["code after prompt"] = f"```python\n{flatten_prompt(task)}{worked}\n```"
    if answer is not None:
        forms |= wrap_answer(answer)
        if worked is not None:
            forms["worked, boxed"] = f"{worked}\n\\boxed{{{answer}}}"
    return forms


def call_oracle(oracle: Callable[..., Any], task: Task, *more: Any) -> str | None:
    """Return the result of a user's oracle. Raises ConfigError if it raises, or returns no text."""
    try:
        found = oracle(task, *more)
    except Exception as error:
        raise ConfigError(f"--oracle failed on task {task.id}: {type(error).__name__}: {error}") from error
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"--oracle gave {type(found).__name__} for task {task.id}; a text is expected, or None")
    return found


def states_answer(text: str, answer: str) -> bool:
    """True if a normalised text states the answer: boxed, in a tag, after #### or "the answer is"."""
    if (plain := normalize_text(answer)) not in text:
        return False
    said = _SAID.format(answer=regex.escape(plain))
    return regex.search(said, text) is not None


class NormalizedText:
    """A text as words and as the numbers in it."""

    def __init__(self, text: str) -> None:
        self.text = f" {' '.join(words(normalize_text(text)))} "
        self.raw = normalize_text(text)
        self.numbers = {value for found in _NUMBER.findall(text) if (value := parse_number(found)) is not None}

    def has(self, answer: str, value: Fraction | None) -> bool:
        """True if the answer occurs in the text, as a number of its value or as its words."""
        if value is not None:
            return value in self.numbers
        return normalize_phrase(answer) in self.text


def normalize_phrase(answer: str) -> str:
    """Return the words of an answer as they occur in `NormalizedText.text`."""
    return f" {' '.join(words(normalize_text(answer)))} "


def parse_number(text: str) -> Fraction | None:
    """Parse an answer as a number; None for anything else, and for a number with a unit."""
    found = parse_quantity(plain_answer(text)) if len(text) < 100 else None
    return None if found is None or found.unit is not None else found.value


def wrap_answer(answer: str) -> dict[str, str]:
    """Return form name -> the answer in that form."""
    return {
        "boxed": f"The answer is \\boxed{{{answer}}}.",
        "hash": f"#### {answer}",
        "said": f"The answer is {answer}",
        "plain": answer,
        "tag": f"<answer>{answer}</answer>",
        "think and tag": f"<think>\nThis is how it is found.\n</think>\n<answer>\n{answer}\n</answer>",
        "think and boxed": f"<think>\nThis is how it is found.\n</think>\nThe answer is \\boxed{{{answer}}}.",
    }


def canonical_json(value: Any) -> str:
    """Return a text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
