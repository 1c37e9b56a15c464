"""Where the final answer stands in a completion. Never raises, and linear in the length of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmill.rewards.extraction import boxes, hashed, tagged
from rollmill.rewards.k12.text import CJK, folded

_LONGEST = 20_000
"""Characters at the end of a completion that are read."""
_LONGEST_TAIL = 2_000
_LONGEST_LINE = 200
_LIST = r"[(\[]?[A-J]{1,10}(?![A-Za-z])"
_SAID = re.compile(
    r"\banswers?\s*(?:(?:should|must|would|has to) be\b|is|:|="
    r"|are(?!\s+(?:all\s+|both\s+)?(?:correct|right|wrong|incorrect)\b))+"
    r"|\b(?:correct|right|best|final)\s+(?:options?|choices?|statements?)\s*(?:is|are|:)+"
    r"|\b(?:order|sequence)\s*(?:is|:)+"
    r"|\bI\s+(?:choose|pick|select)\b"
    r"|\[答案\]\s*:?|答案(?:应该|应|就)?\s*(?:(?:是|为|选)\s*:?|:)"
    r"|正确的?(?:选项|顺序|说法|排序)\s*(?:应该|应)?\s*(?:是|为|:)+"
    rf"|(?:[故应]|所以|因此)\s*选(?:择|项)?\s*(?:是|为|:)*|(?<![不别])(?<!不能)(?<!不可)(?<!不应)选(?:择|项)?\s*(?:是|为|:)*\s*(?={_LIST})"
    r"|(?<![解问回])答\s*:|[故应]填\s*:?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(rf"\n|[.!?](?=\s|$|[{CJK}])|。")
_SPACE = " \t\r\n*:"


@dataclass(frozen=True, slots=True)
class Found:
    """An answer as it is written.

    `text` is the box, the rest of the sentence after "the answer is", the whole text if it is one short line, or else
    the last line. `boxes` are the contents of all boxes, the last `joined` of which belong together. `tail` is
    everything from where the answer begins. `marked` is False for a last line that nothing marks as the answer.
    """

    text: str
    tail: str
    marked: bool = True
    boxes: tuple[str, ...] = ()
    joined: int = 0

    @property
    def rest(self) -> str:
        """What stands behind the answer on the same line."""
        return self.line[len(self.text) :] if self.line.startswith(self.text) else ""

    @property
    def line(self) -> str:
        """All of the line that the answer begins."""
        return self.tail.partition("\n")[0] if self.marked else self.text


def find(text: str) -> Found | None:
    """The final answer of a completion, behind `</think>` and in `<answer>` if there is one; None where it is empty."""
    text = folded(tagged(text[-_LONGEST:].rpartition("</think>")[2])).strip()
    contents, joined = boxes(text)
    if contents:
        last = ", ".join(contents[-joined:])
        return Found(last, last, boxes=tuple(contents), joined=joined)
    line = hashed(text)
    if line is not None:
        return Found(line, line)
    return _said(text) or _last(text)


def _said(text: str) -> Found | None:
    at = max((found.end() for found in _SAID.finditer(text)), default=None)
    if at is None:
        return None
    tail = text[at : at + _LONGEST_TAIL].lstrip(_SPACE)
    end = _SENTENCE_END.search(tail)
    sentence = (tail[: end.start() + (end[0] == "?")] if end else tail).strip(_SPACE)  # a question is no answer
    return Found(sentence, tail) if sentence else None


def _last(text: str) -> Found | None:
    if not text:
        return None
    if "\n" not in text and len(text) <= _LONGEST_LINE:
        return Found(text, text)
    lines = text.splitlines()
    paragraph = text.rpartition("\n\n")[2]
    return Found(lines[-1].strip(_SPACE)[-_LONGEST_LINE:], paragraph[-_LONGEST_TAIL:], marked=False)
