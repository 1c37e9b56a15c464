"""The result of grading one answer, and the texts that are graded: completions and questions of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, NO_ANSWER, HEDGED, UNREADABLE = "ok", "no_answer", "hedged", "unreadable"
"""Outcomes: compared; no final answer; several are offered; it does not fit the type of the question."""
TIMEOUT, MEMORY = "timeout", "memory"
"""Outcomes of a comparison that was ended."""

Text = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat, whose last one counts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of an answer, from 0 to 1, and how it came about.

    `outcome` is "ok" if the answer was compared with the reference, else the reason why not: `no_answer`, `hedged`,
    `unreadable`, `too_long`, `too_deep`, `too_costly`, `timeout` or `memory`. `queue_s` is the time in seconds until a
    grader process was free, `run_s` the time it then took; None if none was needed.
    """

    score: float
    outcome: str = OK
    queue_s: float = 0.0
    run_s: float | None = None

    @property
    def correct(self) -> bool:
        """True if the answer earns everything."""
        return self.score == 1.0


def last_text(text: Text) -> str:
    """Return a text, or that of the last message of a chat."""
    return text if isinstance(text, str) else str(text[-1]["content"])


def answer_text(completion: Text) -> str | None:
    """Return a completion without its reasoning, which ends with `</think>`; None if that is missing."""
    text = last_text(completion)
    _, closed, answer = text.rpartition("</think>")
    return answer if closed else None if "<think>" in text else text
