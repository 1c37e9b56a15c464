"""Blanks: which text stands in which blank."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.rewards.k12.finding import Found
from rollmill.rewards.k12.text import number_of
from rollmill.rewards.numbers import normalised
from rollmill.rewards.structure import split_list

_LABEL = re.compile(
    r"(?:(?<![A-Za-z^_])\((?P<a>\d{1,2})\)|(?:^|(?<=[\s,;、。.]))(?P<b>\d{1,2})[.、)](?=\s|\D)|第(?P<c>[一二三四五六七八九十\d])[个]?(?:空|问|小题)[是为填:]*"
    r"|(?i:blank) ?(?P<e>\d{1,2}) ?:?|(?P<d>[①-⑳]))[ :：.、]*"
)
_HAN = "一二三四五六七八九十"
_STRONG = re.compile(r"\s*[;；、\n]\s*")
_OUTER = " \t\n,;，；。、"


def filled(found: Found, count: int) -> list[str] | None:
    """The texts in `count` blanks, in order; fewer where fewer are filled in, None where there are more.

    Several boxes are one blank each. In a single text the blanks are numbered, or parted by semicolons, 、 or commas.
    """
    if count == 1:
        return [found.text]
    for contents in (found.boxes[len(found.boxes) - found.joined :], found.boxes):
        if len(contents) == count:
            return list(contents)
    if found.joined > 1:
        return list(found.boxes[-found.joined :]) if found.joined < count else None
    for text in (found.text, found.tail):
        if (numbered := _numbered(text, count)) is not None:
            return numbered
    plain = normalised(found.text)
    for pieces in (_parted(found.text), split_list(plain), split_list(plain, thousands=False)):
        if pieces is not None and len(pieces) == count:
            return [piece.strip(_OUTER) for piece in pieces]
    rest = _parted(found.text)
    return rest if len(rest) < count else None


def _numbered(text: str, count: int) -> list[str] | None:
    """What stands behind the labels 1 to `count`, each of which occurs once, the first at the start."""
    labels = list(_LABEL.finditer(text))
    if [_number(label) for label in labels] != list(range(1, count + 1)) or text[: labels[0].start()].strip():
        return None
    ends = [*(label.start() for label in labels[1:]), len(text)]
    return [text[label.end() : end].strip(_OUTER) for label, end in zip(labels, ends, strict=True)]


def _number(label: re.Match[str]) -> int | None:
    if label["d"]:
        return number_of(label["d"])
    if label["c"] and label["c"] in _HAN:
        return _HAN.index(label["c"]) + 1
    return int(label["a"] or label["b"] or label["c"] or label["e"])


def _parted(text: str) -> list[str]:
    return [piece.strip(_OUTER) for piece in _STRONG.split(text.strip(_OUTER))]


def assigned(same: Sequence[Sequence[bool]]) -> int:
    """How many blanks can be right when answers go to any of them, each to one: a largest matching.

    `same[i][j]` says whether blank i may hold answer j.
    """
    holder: dict[int, int] = {}

    def place(blank: int, tried: set[int]) -> bool:
        for answer, fits in enumerate(same[blank]):
            if fits and answer not in tried:
                tried.add(answer)
                if answer not in holder or place(holder[answer], tried):
                    holder[answer] = blank
                    return True
        return False

    return sum(place(blank, set()) for blank in range(len(same)))
