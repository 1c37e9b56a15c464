"""The texts and pictures of a task, and texts as words."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import regex

from rollmill.core.types import Task
from rollmill.tasks.images import image_refs

_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]|[[\p{L}\p{M}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}]]+|[^\s\p{L}\p{M}\p{N}_]",
    regex.V1,
)


Pictures = tuple[str, ...]
"""Digests of a task's pictures."""


def pictures_of(task: Task) -> Pictures:
    """The pictures that a task asks about; tasks with different ones are different."""
    return tuple(image.sha256 for image in image_refs(task.metadata))


def prompt_of(task: Task) -> str:
    """What the task asks, as text; of a chat all messages but the system's."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(message["content"] for message in task.prompt if message["role"] != "system")


def normalised(text: str) -> str:
    """A text for comparison: compatible characters, case and spaces do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Words, signs and Chinese or Japanese characters of a normalised text, in order."""
    return _WORD.findall(text)


def sequences(of: list[str], length: int) -> Iterator[str]:
    """Every run of `length` words; all words, where there are fewer."""
    for start in range(max(len(of) - length, 0) + 1):
        yield " ".join(of[start : start + length])
