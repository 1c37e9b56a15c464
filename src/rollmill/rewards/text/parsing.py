"""Helpers of text rewards: JSON inside text, code blocks and words. Linear in the length of any text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from rollmill.files import is_too_deep
from rollmill.types import Completion

if TYPE_CHECKING:
    import regex

Result = TypeVar("Result")

MAX_TEXT_CHARS = 200_000
"""Characters; rewards that parse structures give 0 to longer texts, with the outcome `too_long`."""
_SHORT = 4000
_ATTEMPTS = 2000
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)
_UNSPACED = r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}"


async def run_large_in_thread(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Run `work(*arguments)`, in a thread if it is large, so that other rewards can proceed.

    `size` is the number of characters to read, or of other steps of a few microseconds.
    """
    import asyncio

    return await asyncio.to_thread(work, *arguments) if size > _SHORT else work(*arguments)


def split_words(text: str) -> list[str]:
    """Split into words, punctuation marks, and single characters of scripts without spaces between words."""
    found: list[str] = _word_pattern().findall(text, concurrent=True)
    return found


@cache
def _word_pattern() -> regex.Pattern[str]:
    import regex

    return regex.compile(
        rf"[{_UNSPACED}]|[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+|[^\s\p{{L}}\p{{M}}\p{{N}}_]", regex.V1
    )


def completion_length(completion: Completion) -> int:
    """Return the length in tokens; in words if there is only text."""
    return len(completion.token_ids) or len(split_words(completion.text))


def last_code_block(text: str) -> str | None:
    """Return the content of the last closed fenced block; a line of three backticks alone closes it."""
    block, opened = None, -1
    for fence in _FENCE.finditer(text):
        if opened < 0:
            opened = fence.end() + 1
        elif not fence[1].strip():
            block, opened = text[opened : fence.start()], -1
    return block


def find_json_values(text: str) -> list[Any]:
    """Return every outermost JSON list and object in a text, in order, except those nested too deeply.

    Numbers may be NaN and infinite. Takes time linear in the text.
    """
    decoder = json.JSONDecoder()
    found, position, left = [], 0, 4 * len(text)
    for _ in range(_ATTEMPTS):
        opening = _OPENING.search(text, position)
        if opening is None or left < 0:
            break
        position = opening.start()
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            left -= error.pos - position
            position += 1
        except (ValueError, RecursionError):  # a number of thousands of digits; thousands of brackets
            left -= 5000
            position += 1
        else:
            found += [] if is_too_deep(value) else [value]
            position = end
    return found


_OPENING = re.compile(r"""\[(?=\s*[][{"\dtfnNI-])|{(?=\s*["}])""")
"""Possible beginnings of JSON; the braces of formulas do not match."""
