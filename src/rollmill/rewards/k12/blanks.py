"""Blanks: which text stands in which blank."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.rewards.answers.collection import split_list
from rollmill.rewards.answers.extraction import FinalAnswer
from rollmill.rewards.answers.normalization import parse_circled_digit
from rollmill.rewards.answers.phrase import extract_value
from rollmill.rewards.answers.quantities import normalize_answer

_LABEL = re.compile(
    r"(?:(?<![A-Za-z^_])\((?P<a>\d{1,2})\)|(?:^|(?<=[\s,;、。.]))(?P<b>\d{1,2})[.、)](?=\s|\D)|第(?P<c>[一二三四五六七八九十\d])[个]?(?:空|问|小题)[是为填:]*"
    r"|(?:(?i:blank|answer|part)|空) ?\(?(?P<e>\d{1,2})\)? ?(?:(?i:is|should be)\b|:)?"
    r"|(?i:\b(?:the )?(?P<f>first|second|third|fourth|fifth|sixth)(?: (?:blank|answer|one|space|value"
    r"|part))?(?: (?:is|should be)\b|:))|(?P<d>[①-⑳]))[ :：.、]*"
)
_ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
_HAN = "一二三四五六七八九十"
_STRONG = re.compile(r"\s*[;；、\n]\s*")
_ORDINAL = re.compile(r"\b(?:second|blank \(?2)\b|第[二2]|空2", re.IGNORECASE)
_LEADING = re.compile(r"(?:so|thus|therefore|hence|the answers? (?:to|for|in|of)|所以|因此|,|:|\s)*", re.IGNORECASE)
_OUTER = " \t\n,;，；。、"


def parse_blanks(found: FinalAnswer, paragraph: str, count: int) -> list[tuple[str, str]] | None:
    """The texts in `count` blanks and their values, in order; fewer where fewer are filled in, None where more are.

    Several boxes are one blank each. In a single text the blanks are numbered, or parted by semicolons, 、 or commas.
    `paragraph` is the last one of the completion, where labels such as "the second blank" stand.
    """
    texts = _texts(found, paragraph, count)
    return None if texts is None else [(text, extract_value(text, leads=True)) for text in texts]


def _texts(found: FinalAnswer, paragraph: str, count: int) -> list[str] | None:
    if not found.boxes and _ORDINAL.search(paragraph) and (numbered := _numbered(paragraph, count)) is not None:
        return numbered
    for contents in (found.boxes[len(found.boxes) - found.joined :], found.boxes):
        if len(contents) == count:
            return list(contents)
    if found.joined > 1:
        return list(found.boxes[-found.joined :]) if found.joined < count else None
    for text in (found.text, found.tail):
        if (numbered := _numbered(text, count)) is not None:
            return numbered
    plain = normalize_answer(found.text)
    value = normalize_answer(extract_value(found.text, leads=found.marked))
    for pieces in (_parted(found.text), split_list(plain), split_list(plain, thousands=False), split_list(value)):
        if pieces is not None and len(pieces) == count:
            return [piece.strip(_OUTER) for piece in pieces]
    rest = _parted(found.text)
    return rest if len(rest) < count else None


def _numbered(text: str, count: int) -> list[str] | None:
    """What stands behind the labels 1 to `count`, each of which occurs once, the first at the start."""
    found = list(_LABEL.finditer(text))
    kinds = [[label for label in found if label[kind]] for kind in "abcdef"]
    labels = next(
        (each for each in (found, *kinds) if [_number(label) for label in each] == list(range(1, count + 1))), None
    )
    if not labels or _LEADING.sub("", text[: labels[0].start()]):
        return None
    ends = [*(label.start() for label in labels[1:]), len(text)]
    pieces = [text[label.end() : end].strip(_OUTER) for label, end in zip(labels, ends, strict=True)]
    return [
        re.sub(r"\s*(?:,?\s*(?:\band|和|而|,))?(?:,?\s*the answers? (?:to|for|in|of))?$", "", piece) for piece in pieces
    ]


def _number(label: re.Match[str]) -> int | None:
    if label["d"]:
        return parse_circled_digit(label["d"])
    if label["c"] and label["c"] in _HAN:
        return _HAN.index(label["c"]) + 1
    if label["f"]:
        return _ORDINALS.index(label["f"].lower()) + 1
    return int(label["a"] or label["b"] or label["c"] or label["e"])


def _parted(text: str) -> list[str]:
    return [piece.strip(_OUTER) for piece in _STRONG.split(text.strip(_OUTER))]


def count_matched_blanks(same: Sequence[Sequence[bool]]) -> int:
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
