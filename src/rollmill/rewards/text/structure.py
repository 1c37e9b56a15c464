"""Tags and headings: which rules of the form a text keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rollmill.rewards.text.parsing import split_words

_WORDS = re.compile(r"\w")


def check_tags(text: str, tags: Sequence[str], fewest: int) -> list[bool]:
    """One rule per tag: opened once, closed once after that, `fewest` words inside. Then one for their order, with none
    inside another, and one for nothing outside."""
    marks = [
        (found[2], bool(found[1]), found.start(), found.end())
        for found in re.finditer(rf"<(/?)({'|'.join(map(re.escape, tags))})>", text)
    ]
    rules = []
    for tag in tags:
        own = [mark for mark in marks if mark[0] == tag]
        paired = [mark[1] for mark in own] == [False, True]
        rules.append(paired and _enough(text[own[0][3] : own[1][2]], fewest))
    in_order = [mark[:2] for mark in marks] == [(tag, closing) for tag in tags for closing in (False, True)]
    outside = _outside(text, [(mark[2], mark[3]) for mark in marks]) if in_order else "missing"
    return [*rules, in_order, not outside.strip()]


def _outside(text: str, marks: Sequence[tuple[int, int]]) -> str:
    """What stands outside of pairs of marks."""
    edges = [
        0,
        *(edge for opening, closing in zip(marks[::2], marks[1::2], strict=True) for edge in (opening[0], closing[1])),
        len(text),
    ]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def check_sections(text: str, sections: Sequence[str], fewest: int) -> list[bool]:
    """One rule per section (its heading stands once, with `fewest` words below), then: their order."""
    wanted = {_folded(section): section for section in sections}
    lines = text.split("\n")
    places = [(number, name) for number, line in enumerate(lines) if (name := _heading(line)) in wanted]
    edges = [*places, (len(lines), "")]
    filled = {name: _enough("\n".join(lines[number + 1 : end]), fewest) for (number, name), (end, _) in pairwise(edges)}
    names = [name for _, name in places]
    rules = [names.count(name) == 1 and filled[name] for name in wanted]
    return [*rules, names == list(wanted)]


def _heading(line: str) -> str:
    """The name of a heading; nothing where the line has none of its marks."""
    line = line.strip()
    marked = line.startswith(("#", "**", "__")) or line.endswith(":")
    return _folded(line) if marked and len(line) <= 200 else ""


def _folded(name: str) -> str:
    return " ".join(name.strip(" \t:*_#").casefold().split())


def _enough(text: str, fewest: int) -> bool:
    """Whether there are `fewest` words; punctuation alone is none."""
    return sum(1 for word in split_words(text) if _WORDS.match(word)) >= fewest
