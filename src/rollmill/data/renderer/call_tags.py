"""Closing tags within arguments, in formats of calls whose arguments stand between tags."""

from __future__ import annotations

import re
from typing import Any

_CLOSING = re.compile(r"</[\w:]+>")
_NEXT = re.compile(r"\s*(</?[\w:]+|\S|\Z)")
_STAND_IN = "@closing-tag-"


class CallTags:
    """The closing tags of a format of calls, and what follows each of them.

    A closing tag that the format goes on behind in another way is part of an argument: `a </tool_call> b` within
    `<parameter=text>`.

    Args:
        written: two calls with two arguments each, as the model's template writes them; may be empty.
    """

    def __init__(self, written: str) -> None:
        self._followers = dict[str, set[str]]()
        for found in _CLOSING.finditer(written):
            self._followers.setdefault(found[0], set()).add(_next(written, found.end()))
        self._stand_ins = {tag: f"{_STAND_IN}{i}@" for i, tag in enumerate(self._followers)}

    def in_text(self, text: str) -> bool:
        """True if a text has one of the tags; an answer beside calls has none."""
        return any(tag in text for tag in self._followers)

    def hide(self, text: str) -> str:
        """Put other words in place of the tags that are part of an argument."""
        if _STAND_IN in text:
            return text
        for found in reversed(list(_CLOSING.finditer(text))):  # one before a hidden one is part of the argument, too
            followers = self._followers.get(found[0])
            if followers is not None and _next(text, found.end()) not in followers:
                text = f"{text[: found.start()]}{self._stand_ins[found[0]]}{text[found.end() :]}"
        return text

    def restore(self, value: Any) -> Any:
        """Put the tags back into a text, or into the texts of a JSON value."""
        if isinstance(value, dict):
            return {self.restore(key): self.restore(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.restore(each) for each in value]
        if isinstance(value, str):
            for tag, stand_in in self._stand_ins.items():
                value = value.replace(stand_in, tag)
        return value


def _next(text: str, at: int) -> str:
    """The tag's beginning, or the letter, that follows a place in a text; empty at its end."""
    found = _NEXT.match(text, at)
    return found[1] if found else ""
