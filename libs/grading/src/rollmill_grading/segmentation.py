"""Splits a completion into formulas and sentences. Line breaks and full stops inside formulas end no sentence.

Never raises, and linear in the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rollmill_grading.normalization import CJK

_LONGEST_FORMULA = 3000
_OPENINGS = re.compile(
    r"\\\\|\\\$|(?P<display>\$\$|\\\[|\\begin\{(?P<name>align|aligned|equation|gather|gathered|eqnarray|multline)\*?\})"
    r"|(?P<inline>\$|\\\()|(?P<code>`{1,3})"
)
_CLOSINGS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])[A-Za-z]{2,}[,.;]? +(?:[a-z]{2,}|a|I)(?![A-Za-z])|[\d)] +[a-z]{3,} |[a-z]{3,}[.!?] "
)
_BRACED_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\*?\s*\{[^{}]*\}")
_ENDS = re.compile(rf"\n|(?:!+|[.?])(?=[\s*\"')\]]|$|[{CJK}])|[。！？]")
_STEP_MARK = re.compile(r"(?:^|\n)[ \t>]*\(?\d{1,2}$")


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula or a piece of code with its delimiters, `text[start:end]`, and the text between them."""

    start: int
    end: int
    inner: str
    kind: Literal["display", "inline", "code"]


class SegmentedText:
    """A text, its formulas in order, and the ends of its sentences."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def formulas(self) -> list[Formula]:
        """All formulas and pieces of code, in order."""
        return _formulas(self.text)

    @cached_property
    def _starts(self) -> list[int]:
        return [formula.start for formula in self.formulas]

    def formula_at(self, at: int) -> Formula | None:
        """Return the formula that covers a position."""
        index = bisect_right(self._starts, at) - 1
        return self.formulas[index] if index >= 0 and at < self.formulas[index].end else None

    def sentence_end(self, at: int, limit: int = 2000) -> int:
        """Return the end of the sentence at position `at`: before its full stop or line break.

        A line that runs into a displayed formula includes it.
        """
        stop = min(len(self.text), at + limit)
        while (found := _ENDS.search(self.text, at, stop)) is not None:
            inside = self.formula_at(found.start())
            if inside is not None:
                at = inside.end
                continue
            if found[0] == "." and _STEP_MARK.search(self.text, max(0, found.start() - 4), found.start()):
                at = found.end()
                continue
            if found[0] == "\n" and (display := self._display_behind(found.end())) is not None:
                at = display.end
                continue
            return found.start()
        return stop

    def _display_behind(self, at: int) -> Formula | None:
        blank = re.compile(r"\s{0,40}").match(self.text, at)
        formula = self.formula_at(blank.end() if blank else at)
        return formula if formula is not None and formula.kind == "display" else None

    def sentences(self) -> list[tuple[int, int]]:
        """Return start and end of every sentence that is not blank."""
        found, at = [], 0
        while at < len(self.text):
            end = self.sentence_end(at, len(self.text))
            if self.text[at:end].strip():
                found.append((at, end))
            at = max(end, at) + 1
            while self.text[at : at + 1] == "!":
                at += 1
        return found


def _formulas(text: str) -> list[Formula]:
    found: list[Formula] = []
    if not any(sign in text for sign in "\\$`"):
        return found
    at = 0
    while (opening := _OPENINGS.search(text, at)) is not None:
        formula = _formula(text, opening)
        if formula is None:
            at = opening.end()
        else:
            found.append(formula)
            at = formula.end
    return found


def _formula(text: str, opening: re.Match[str]) -> Formula | None:
    """Return the formula that starts with an opening delimiter; None if it is not closed, or is a currency sign."""
    mark, start, inner = opening[0], opening.start(), opening.end()
    if opening["display"]:
        closing = f"\\end{{{mark[7:]}" if opening["name"] else _CLOSINGS[mark]
        end = text.find(closing, inner, inner + _LONGEST_FORMULA)
        return None if end < 0 else Formula(start, end + len(closing), text[inner:end].strip(), "display")
    if opening["code"]:
        end = text.find(mark, inner, inner + 200 if len(mark) == 1 else inner + _LONGEST_FORMULA)
        if end < 0 or (len(mark) == 1 and "\n" in text[inner:end]):
            return None
        return Formula(start, end + len(mark), text[inner:end].strip(), "code")
    if not opening["inline"]:
        return None
    closing = "\\)" if mark == "\\(" else "$"
    end = text.find(closing, inner, inner + _LONGEST_FORMULA)
    while closing == "$" and end > 0 and text[end - 1] == "\\":
        end = text.find(closing, end + 1, inner + _LONGEST_FORMULA)
    if end < 0:
        return None
    content = text[inner:end]
    if "\n\n" in content or (closing == "$" and ("\n" in content or _is_prose(content))):
        return None
    return Formula(start, end + len(closing), content.strip(), "inline")


def _is_prose(content: str) -> bool:
    """True if two dollar signs are currency with a sentence between them, not formula delimiters."""
    plain = _BRACED_WORDS.sub("", content)
    return not plain.strip() or _PROSE.search(plain) is not None or bool(re.match(r"\d[\d,.]*\s+[a-z]{2,}", plain))


def last_tag_content(text: str, tag: str) -> str | None:
    """Return the text inside the last `<tag>...</tag>`; None if it is not closed, or there is no such tag."""
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    inside, closed, _ = text[start + len(tag) + 2 :].partition(f"</{tag}>")
    return inside if closed else None
