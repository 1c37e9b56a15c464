"""Extracts the final answer of a text without reasoning: the candidate with the best evidence that nothing retracts.

The order is: a box, `####`, a stated answer, the whole of a short text, the concluding sentence. Of candidates of one
kind the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollmill_grading.candidates import (
    AnswerCandidate,
    AnswerKind,
    apply_correction,
    find_bare_answer,
    find_boxes,
    find_concluding_sentence,
    find_hash_answer,
    find_last_line,
    find_stated_answers,
)
from rollmill_grading.hedging import is_hedged
from rollmill_grading.normalization import to_half_width
from rollmill_grading.phrase import extract_statements, extract_value, has_value
from rollmill_grading.quantities import normalize_answer, parse_quantity, strip_spaces
from rollmill_grading.segmentation import SegmentedText, last_tag_content

AnswerExtraction = Literal["auto", "boxed", "hash", "last_number"]
VoteExtraction = Literal["auto", "boxed", "hash", "last_number", "text"]

_LONGEST = 20_000
"""Characters at the end of a text that are read."""
_LONGEST_TAIL = 2_000
_BETWEEN_BOXES = re.compile(
    r"[\s$.,;:\\()\[\]]*(?:\\text\s*\{)?\s*(?:or|and|,|;|[或和与、，；])?\s*\}?[\s$.,;:\\()\[\]]*", re.IGNORECASE
)
_NUMBER_TEXT = r"[+-]?\$?(?:\\frac\s*\{-?\d+\}\s*\{-?\d+\}|\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?|\.\d+)%?"
_NUMBER = re.compile(rf"(?<![\w.^/]){_NUMBER_TEXT}")
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z]) ?\$ ?\^ ?\{?([23])\}? ?\$")
"""`cm$^2$`: LaTeX only for the power of a unit."""
_FULL_WIDTH_MARK = re.compile(r"(?<=[\d)}\]$])！")
"""An exclamation mark that is never a factorial."""
_JOINED_BY_OR = re.compile(r"\s*(?:,?\s*or|/)\s*(?:even|maybe|perhaps)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """An answer as it is written.

    `text` is the box, the rest of the sentence after "the answer is", the whole of a short text, or the concluding
    sentence. `value` is the value in it, with its unit and without reasons. `tail` is everything from the start of the
    answer. `boxes` are the contents of all boxes, the last `joined` of which belong together. `hedged`: another answer
    is offered as well.
    """

    kind: AnswerKind
    text: str
    value: str
    tail: str
    boxes: tuple[str, ...] = ()
    joined: int = 0
    hedged: bool = False

    @property
    def marked(self) -> bool:
        """True if something marks it as the answer, or it is the whole of a short text."""
        return self.kind not in ("sentence", "bold") and (self.kind != "line" or self.tail == self.text)

    @property
    def rest(self) -> str:
        """The text after the answer on the same line."""
        return self.line[len(self.text) :] if self.line.startswith(self.text) else ""

    @property
    def line(self) -> str:
        """The whole line that starts with the answer."""
        return self.tail.partition("\n")[0] if self.marked else self.text


def extract_answer(text: str, place: AnswerExtraction = "auto", *, values: bool = True) -> FinalAnswer | None:
    """Return the final answer, in the last `<answer>...</answer>` if any; None without one.

    The text, which has no reasoning any more, is read in half width. Never raises, and linear in the length of the
    text.

    Args:
        place: `boxed`, `hash` and `last_number` read that place only.
        values: if nothing marks an answer, use the last sentence with a value; otherwise the last line.
    """
    if place != "auto":
        return _answer_at_place(SegmentedText(to_half_width(text[-_LONGEST:])), place)
    passage = SegmentedText(answer_section(text))
    contents = find_boxes(passage.text)
    if contents is None:
        return None
    for candidate in _marked_candidates(passage, contents):
        if candidate is not None and (found := _confirm_candidate(passage, contents, candidate)) is not None:
            return found
    for candidate in (find_concluding_sentence(passage) if values else None, find_last_line(passage.text)):
        if candidate is not None:
            return _confirm_candidate(passage, [], candidate)
    return None


def _marked_candidates(passage: SegmentedText, contents: list[AnswerCandidate]) -> Iterator[AnswerCandidate | None]:
    """Find candidates one after the other, because most completions need only the first."""
    yield _joined(passage.text, contents)
    yield find_hash_answer(passage.text)
    yield from find_stated_answers(passage)
    yield find_bare_answer(passage.text)


def answer_section(text: str) -> str:
    """Return the part of a text that holds its final answer, in half width: inside `<answer>` tags if any."""
    text = text[-_LONGEST:]
    if not text.isascii():
        text = to_half_width(_FULL_WIDTH_MARK.sub("。", text))
    inside = last_tag_content(text, "answer")
    text = text if inside is None else inside
    return _POWER_OF_UNIT.sub(r"^\1", text) if "^" in text else text


def _joined(text: str, contents: list[AnswerCandidate]) -> AnswerCandidate | None:
    """Return the last box; boxes separated only by "or", "and" or commas are one answer with commas."""
    if not contents:
        return None
    last = contents[len(contents) - _count_joined(text, contents) :]
    return AnswerCandidate("boxed", ", ".join(dict.fromkeys(each.text for each in last)), last[0].start, last[-1].end)


def _count_joined(text: str, contents: list[AnswerCandidate]) -> int:
    """Count the last boxes that belong together."""
    first = len(contents) - 1
    while first > 0 and _belong(text[contents[first - 1].end : contents[first].start]):
        first -= 1
    return len(contents) - max(first, 0)


def _belong(between: str) -> bool:
    return len(between) <= 40 and _BETWEEN_BOXES.fullmatch(between) is not None


def _confirm_candidate(
    passage: SegmentedText, contents: list[AnswerCandidate], candidate: AnswerCandidate
) -> FinalAnswer | None:
    """Return the answer of a candidate or of its correction; None if it is retracted without one."""
    text = passage.text
    value = _value(candidate)
    if candidate.kind in ("boxed", "hash", "said", "bold"):
        kept = apply_correction(passage, candidate, value)
        if kept is None:
            return None
        if kept is not candidate:
            candidate, value = kept, _value(kept)
    if candidate.kind == "line" and (words := extract_statements(text)) and not has_value(words[0]):
        value = words[0]
    at = text.rfind(value, candidate.start, candidate.end) if value else -1
    behind = text[candidate.end if at < 0 else at + len(value) :]
    hedged = bool(value) and candidate.kind != "bare" and is_hedged(value, behind)
    if candidate.kind == "boxed":
        texts = tuple(each.text for each in contents)
        return FinalAnswer("boxed", candidate.text, value, candidate.text, texts, _count_joined(text, contents), hedged)
    tail = text[candidate.start :][:_LONGEST_TAIL]
    if candidate.kind == "hash":
        tail = candidate.text
    elif candidate.kind == "line" and candidate.text != text.strip():
        tail = text.rpartition("\n\n")[2][-_LONGEST_TAIL:]
    return FinalAnswer(candidate.kind, candidate.text, value, tail, hedged=hedged)


def _value(candidate: AnswerCandidate) -> str:
    if candidate.kind in ("boxed", "bare"):
        return candidate.text
    if candidate.kind == "line":  # a line with a value that was not a conclusion is not an answer
        return "" if has_value(candidate.text) else extract_value(candidate.text, leads=False)
    return extract_value(candidate.text, leads=candidate.kind != "sentence")


def _answer_at_place(passage: SegmentedText, place: AnswerExtraction) -> FinalAnswer | None:
    text = passage.text
    if place == "last_number":
        number = last_number(text)
        return None if number is None else FinalAnswer("sentence", number, number, number)
    contents = (find_boxes(text) or []) if place == "boxed" else []
    candidate = _joined(text, contents) if place == "boxed" else find_hash_answer(text)
    return None if candidate is None else _confirm_candidate(passage, contents, candidate)


def last_number(text: str) -> str | None:
    """Return the last number; "41 or 42" is returned whole, because it is not a single answer."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    if len(matches) > 1 and _JOINED_BY_OR.fullmatch(text, matches[-2].end(), last.start()):
        return text[matches[-2].start() : last.end()]
    return last[0].rstrip(",")


def extract_reference(text: str) -> str:
    """Return a reference as text; of a worked solution only its last \\boxed{} or the text after "####"."""
    contents = find_boxes(text) or []
    found = _joined(text, contents) or find_hash_answer(text)
    return found.text if found is not None and found.text else text


# Normalises answers as votes: equal answers become equal texts.

_LONGEST_VOTES = 400
"""Characters of an answer that are compared as a number."""


def normalize_vote(text: str, place: VoteExtraction) -> str | None:
    """Return the vote of a text without reasoning: its answer; None if there is none, or another one is offered, too.

    Numbers of one value are one vote, whatever percent sign or unit they have (0.5 and 1/2 are; 0.333 and 1/3 are not);
    everything else is compared by its text without spaces. Formulas are not compared: (x+1)^2 and x^2+2x+1 are two
    votes.
    """
    if place == "text":
        answer = text.strip()
    else:
        found = extract_answer(text, place)
        answer = "" if found is None or found.hedged else found.value
    if not answer:
        return None
    written = strip_spaces(normalize_answer(answer))
    number = parse_quantity(normalize_answer(answer)) if len(answer) <= _LONGEST_VOTES else None
    return (written or None) if number is None else str(number.value)
