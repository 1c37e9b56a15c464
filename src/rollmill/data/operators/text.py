"""The texts and pictures of a task, and texts as words."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import regex

from rollmill.data.images import image_refs_of
from rollmill.types import Task

_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]|[[\p{L}\p{M}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}]]+|[^\s\p{L}\p{M}\p{N}_]",
    regex.V1,
)


ImageDigests = tuple[str, ...]
"""Digests of a task's pictures."""


def image_digests(task: Task) -> ImageDigests:
    """The pictures that a task asks about; tasks with different ones are different."""
    return tuple(image.sha256 for image in image_refs_of(task.metadata))


def flatten_prompt(task: Task) -> str:
    """What the task asks, as text; of a chat all messages but the system's."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(message["content"] for message in task.prompt if message["role"] != "system")


def normalize_text(text: str) -> str:
    """A text for comparison: compatible characters, case and spaces do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Words, signs and Chinese or Japanese characters of a normalised text, in order."""
    return _WORD.findall(text)


def word_ngrams(of: list[str], length: int) -> Iterator[str]:
    """Every run of `length` words; all words, where there are fewer."""
    for start in range(max(len(of) - length, 0) + 1):
        yield " ".join(of[start : start + length])
