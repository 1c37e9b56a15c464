"""The citation reward: cited ids must exist, and quotations must occur in the cited facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rollmill.rewards.base import Score, TextReward
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.types import Completion, Task

_BRACKET = re.compile(r"\[([^\[\]\n]{1,200})\](?!\()")
_ID = re.compile(r"(?:[A-Za-z_][\w.-]{0,40}:)?[\w.-]{1,60}")
_LOOKS_LIKE_ID = re.compile(r"\d+|[A-Za-z_][\w.-]*:[\w.-]+")
_MOST_CITATIONS, _MOST_QUOTES = 1000, 200
_QUOTE_ENDS = {'"': '"', "”": "“", "»": "«", "“": "„"}


@dataclass(frozen=True, slots=True)
class CitationSpan:
    """One citation: the ids, and the quotation right before them, if any."""

    names: list[str]
    quote: str


class CitationReward(TextReward):
    """Citation quality of the answer from 0 to 1: citations such as [1] or [doc:3] of the facts in the task's column
    `facts`.

    Precision if the column `citations` does not list the required citations, else F1. Invented ids, and quotations that
    do not appear in the fact, count as wrong citations.
    """

    largest = 1.0
    name: Literal["citation"]
    quotes: Literal["check", "require", "ignore"] = "check"
    """Quoted text right before a citation must appear in the cited fact. `require`: a citation without such a quotation
    is wrong."""
    quote_words: int = Field(3, ge=1)
    """Minimum words of a quotation; shorter ones are ignored."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score of the citations; none for a task without the column `facts`.

        Outcomes besides ok: `no_answer`, `no_citation`, `invented` (an unknown id), `misquoted`, `too_many`,
        `too_long`.
        """
        if task.metadata.get("facts") is None:
            return Score(None)
        facts = read_facts(task.metadata["facts"])
        needed = _needed(task.metadata.get("citations"), facts)
        text = self.select_answer(completion)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        return await run_large_in_thread(len(text) + sum(map(len, facts.values())), self._score, text, facts, needed)

    def _score(self, text: str, facts: dict[str, str], needed: set[str] | None) -> Score:
        found = _citations(text, facts)
        if not found:
            return Score(0.0, "no_citation") if needed is None or needed else Score(1.0)
        if sum(len(citing.names) for citing in found) > _MOST_CITATIONS:
            return Score(0.0, "too_many")
        names = {name for citing in found for name in citing.names}
        cited, invented = names & facts.keys(), names - facts.keys()
        misquoted, backed = self._quotes(found, facts)
        right = cited if needed is None else cited & needed
        right = right & backed if self.quotes == "require" else right
        made = len(names) + misquoted
        value = len(right) / made if needed is None else 2 * len(right) / (made + len(needed))
        return Score(value, "invented" if invented else "misquoted" if misquoted else "ok")

    def _quotes(self, found: list[CitationSpan], facts: dict[str, str]) -> tuple[int, set[str]]:
        """Return the number of quotations in none of their cited facts, and the ids backed by one that is."""
        backed: set[str] = set()
        misquoted = 0
        if self.quotes == "ignore":
            return misquoted, backed
        folded = {name: _folded(text) for name, text in facts.items()}
        for number, citing in enumerate(found):
            quote = _folded(citing.quote)
            names = [name for name in citing.names if name in facts]
            if not names or len(quote.split()) < self.quote_words:
                continue
            within = [name for name in names if number < _MOST_QUOTES and _occurs_in(quote, folded[name])]
            backed |= set(within)
            misquoted += not within
        return misquoted, backed


def read_facts(column: Any) -> dict[str, str]:
    """Return id -> text from the column `facts`: a mapping, or a list.

    The ids of a list are 1, 2, ... unless its entries have an `id`. Raises ValueError if it is something else.
    """
    facts: dict[str, str] = {}
    if isinstance(column, Mapping):
        facts = {str(name): text for name, text in column.items()}
    elif isinstance(column, Sequence) and not isinstance(column, str):
        for number, entry in enumerate(column, 1):
            is_mapping = isinstance(entry, Mapping)
            facts[str(entry.get("id", number)) if is_mapping else str(number)] = (
                entry.get("text") if is_mapping else entry
            )
    if not facts or not all(isinstance(text, str) for text in facts.values()):
        raise ValueError(
            "the task's column `facts` must be a list of texts, a list of {id, text}, or a mapping from ids to texts"
        )
    if len(facts) < len(column):
        raise ValueError("the task's column `facts` has an id twice; give each fact an id of its own")
    return facts


def _needed(column: Any, facts: dict[str, str]) -> set[str] | None:
    if column is None:
        return None
    if not isinstance(column, Sequence) or isinstance(column, str):
        raise ValueError(f"the task's column `citations` is {column!r:.80}; expected a list of ids")
    needed = {str(name) for name in column}
    if missing := needed - facts.keys():
        raise ValueError(f"the task's column `citations` names {sorted(missing)}, which its column `facts` lacks")
    return needed


def _citations(text: str, facts: dict[str, str]) -> list[CitationSpan]:
    """Return every citation of a text.

    `doc:3` is `3` if no fact is called `doc:3`; [1][2] is one citation, as is [1, 2].
    """
    found: list[CitationSpan] = []
    previous, named = -1, 0
    for bracket in _BRACKET.finditer(text):
        names = [name.strip() for name in re.split("[,;]", bracket[1])]
        if not all(_ID.fullmatch(name) and (name in facts or _LOOKS_LIKE_ID.fullmatch(name)) for name in names):
            continue
        bare = [name.rpartition(":")[2] for name in names]
        known = [
            name if name in facts or short not in facts else short for name, short in zip(names, bare, strict=True)
        ]
        if previous >= 0 and not text[previous : bracket.start()].strip():
            found[-1].names.extend(known)
        else:
            found.append(CitationSpan(known, _quote_before(text, bracket.start())))
        previous = bracket.end()
        named += len(known)
        if named > _MOST_CITATIONS:
            break
    return found


def _quote_before(text: str, end: int) -> str:
    """Return the text in quotation marks right before a citation."""
    before = text[max(0, end - 2000) : end].rstrip(" \t\n.,;:")
    if not before or before[-1] not in _QUOTE_ENDS:
        return ""
    start = before.rfind(_QUOTE_ENDS[before[-1]], 0, -1)
    return before[start + 1 : -1] if start >= 0 else ""


def _occurs_in(quote: str, fact: str) -> bool:
    """True if the words of a quotation occur in the fact, at word boundaries."""
    return f" {quote} " in f" {fact} "


def _folded(text: str) -> str:
    """Return the words in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
