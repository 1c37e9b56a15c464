"""A completion's text while its tokens come: what may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.rollout.tools.formats import TOOL_CALL_START

_MARKS = (TOOL_CALL_START, "```")
"""Where a tool call may begin."""


class TextStream:
    """Shows text that no later token takes back: not half a character, nor what may become a stop string or a tool
    call. What was shown is the beginning of the whole text.

    Attributes:
        shown: so far.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, tools: bool = False) -> None:
        self.shown = ""
        self._tokenizer, self._tools = tokenizer, tools
        self._marks = (*stops, *(_MARKS if tools else ()))
        self._text, self._tokens = "", list[int]()
        self._from, self._read = 0, 0  # tokens before `_read` are in the text; decoding begins at `_from`

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        self._tokens.append(token)
        before = self._decode(self._from, self._read)
        now = self._decode(self._from, len(self._tokens))
        if not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        return self._show(self._text[: self._safe()])

    def finish(self, text: str) -> str:
        """What is still to be shown of the whole text. Where it begins otherwise than what was shown (bytes that are no
        character), what was shown stays.
        """
        rest = text[len(self.shown) :]
        self.shown += rest
        return rest

    def _show(self, text: str) -> str:
        if len(text) <= len(self.shown) or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        return text

    def _safe(self) -> int:
        """How much of the text stays as it is, whatever comes."""
        text, safe = self._text, len(self._text)
        if self._tools and text.lstrip()[:1] in ("", "{", "["):
            return 0
        for mark in self._marks:
            found = text.find(mark)
            if found < 0:
                ends = (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size]))
                found = len(text) - next(ends, 0)
            safe = min(safe, found)
        return len(text[:safe].rstrip()) if self._tools else safe
