"""Option letters: `(B)`, `B) 12` and, where the options are known, what an option says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CHOICE = re.compile(
    r"(?:(?i:the |correct )*(?i:option|choice|answer) (?i:is )?)?"
    r"(?:\(([A-J])\)(?!\S*[+*/^])|([A-J])[.):](?=\s|$)|([A-J])$)(.*)",
    re.DOTALL,
)


_SEPARATOR = re.compile(r"[\s.,:;=]*(?:-(?=\s))?")
"""Between a letter and its option; in `(B) -2` the sign belongs to the number."""


def task_options(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The options of a task by letter: its column `options` or `choices`, a mapping or a list; empty without one."""
    found = metadata.get("options") or metadata.get("choices")
    if isinstance(found, Mapping):
        return {str(letter).strip("()").upper(): str(option) for letter, option in found.items()}
    if isinstance(found, list | tuple):
        return {chr(ord("A") + index): str(option) for index, option in enumerate(found)}
    return {}


def parse_option_letter(gold: str) -> str | None:
    """The letter where a normalised reference is nothing but an option letter, as in `B` or `(B)`."""
    return gold.strip("()") if re.fullmatch(r"[A-J]|\([A-J]\)", gold) else None


def split_option(answer: str) -> tuple[str, str] | None:
    """The letter that a normalised answer begins with, and what stands behind it."""
    if re.fullmatch(r"\(?[a-j]\)?", answer):
        answer = answer.upper()
    found = _CHOICE.fullmatch(answer)
    if found is None:
        return None
    return found[1] or found[2] or found[3], _SEPARATOR.sub("", found[4], count=1).strip(" .,:;=")
