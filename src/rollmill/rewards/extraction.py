"""Where the final answer stands in a completion. Never raises, and linear in the length of the text."""

from __future__ import annotations

import re

from rollmill.config.rewards import AnswerPlace
from rollmill.rewards.base import inside_last

_LONGEST = 20_000
"""Characters at the end of a completion that are read."""
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*")
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$]+)")
_BETWEEN_BOXES = re.compile(
    r"[\s$.,;:\\()\[\]]*(?:\\text\s*\{)?\s*(?:or|and|,|;|[或和与、，；])?\s*\}?[\s$.,;:\\()\[\]]*", re.IGNORECASE
)
_SAID = re.compile(r"\banswers?\s*(?:is|are|:|=)+\s*:?|答案\s*(?:是|为|：|:)+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)|。")
_NUMBER_TEXT = r"[+-]?\$?(?:\\frac\s*\{-?\d+\}\s*\{-?\d+\}|\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?|\.\d+)%?"
_NUMBER = re.compile(rf"(?<![\w.^/]){_NUMBER_TEXT}")
_JOINED_BY_OR = re.compile(r"\s*(?:,?\s*or|/)\s*(?:even|maybe|perhaps)?\s*", re.IGNORECASE)
_LATEX = re.compile(r"\$\$?([^$]{1,200})\$\$?|\\\(([^$]{1,200}?)\\\)|\\\[([^$]{1,200}?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!sqrt|pi|sin|cos|tan|log|ln|exp)[A-Za-z]{2,}")


def extract(text: str, place: AnswerPlace) -> str | None:
    """The final answer as it is written, or None where the place asked for is empty."""
    text = text[-_LONGEST:]
    if place == "boxed":
        return boxed(text)
    if place == "hash":
        return hashed(text)
    if place == "last_number":
        return last_number(text)
    text = tagged(text)
    for found in (boxed, hashed, said, bare, last_latex, last_number):
        if (answer := found(text)) is not None:
            return answer
    return None


def tagged(text: str) -> str:
    """What stands inside the last `<answer>...</answer>`; the whole text without one."""
    inside = inside_last(text, "answer")
    return text if inside is None else inside


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{}; boxes joined by nothing but "or", "and" or commas are one answer with commas."""
    contents, joined = boxes(text)
    if not contents:
        found = _UNBRACED.findall(text)
        return found[-1] if found else None
    return ", ".join(dict.fromkeys(contents[-joined:]))


def boxes(text: str) -> tuple[list[str], int]:
    r"""Contents of all \boxed{}, in order, and how many of the last are joined by nothing but "or", "and" or commas."""
    places = _boxes(text)
    first = len(places) - 1
    while first > 0 and _are_joined(text[places[first - 1][1] : places[first][0]]):
        first -= 1
    contents = [_OPENING.sub("", text[start:end])[1:-1].strip() for start, end in places]
    return contents, len(places) - max(first, 0)


def _are_joined(between: str) -> bool:
    return len(between) <= 40 and _BETWEEN_BOXES.fullmatch(between) is not None


def _boxes(text: str) -> list[tuple[int, int]]:
    """Start and end of every outermost \\boxed{} with balanced braces, in order."""
    found: list[tuple[int, int]] = []
    open_braces: list[int] = []  # start of the box that a brace opens, -1 for other braces
    for token in _BRACES.finditer(text):
        if token[0] in ("\\\\", "\\{", "\\}"):
            continue
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, token.end()))
        else:
            open_braces.append(token.start() if len(token[0]) > 1 else -1)
    return found


def hashed(text: str) -> str | None:
    """What follows the last "####" on its line."""
    _, mark, tail = text.rpartition("####")
    line = tail.strip().partition("\n")[0].strip()
    return line if mark and line else None


def said(text: str) -> str | None:
    """What follows the last "answer is" up to the end of the sentence."""
    matches = list(_SAID.finditer(text))
    if not matches:
        return None
    tail = text[matches[-1].end() :].lstrip("\n *:")
    end = _SENTENCE_END.search(tail)
    answer = (tail[: end.start()] if end else tail).strip(" *")
    return _number_in(answer) or answer or None


def bare(text: str) -> str | None:
    """The whole text, where it is one short line without words."""
    line = text.strip()
    return line if 0 < len(line) <= 80 and "\n" not in line and not _WORDS.search(line) else None


def last_latex(text: str) -> str | None:
    """The last formula, where no number follows it."""
    matches = [match for match in _LATEX.finditer(text) if re.search(r"[\\^_]", match[1] or match[2] or match[3])]
    if not matches or re.search(r"\d", text[matches[-1].end() :]):
        return None
    return matches[-1][1] or matches[-1][2] or matches[-1][3]


def last_number(text: str) -> str | None:
    """The last number; "41 or 42" is returned whole, because it names no single answer."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    if len(matches) > 1 and _JOINED_BY_OR.fullmatch(text, matches[-2].end(), last.start()):
        return text[matches[-2].start() : last.end()]
    return last[0].rstrip(",")


def _number_in(answer: str) -> str | None:
    """The only number of a phrase with words, together with the words that follow it (a unit)."""
    matches = list(_NUMBER.finditer(answer))
    if len(matches) != 1 or not _WORDS.search(answer[: matches[0].start()]) or "\\" in answer or "=" in answer:
        return None
    return answer[matches[0].start() :]
