"""What a completion votes for: its answer, written so that equal answers are equal texts."""

from __future__ import annotations

from rollmill.config.evaluation import VoteExtraction
from rollmill.rewards.answers.extraction import extract_answer
from rollmill.rewards.answers.quantities import normalize_answer, parse_quantity, strip_spaces

_LONGEST = 400
"""Characters of an answer that are compared as a number."""


def normalize_vote(text: str, place: VoteExtraction) -> str | None:
    """The answer as a ballot; None where there is none, or where another one is offered beside it.

    Numbers of one value are one ballot, whatever percent sign or unit they have (0.5 and 1/2 are; 0.333 and 1/3 are
    not); everything else goes by its text without spaces. No formulas are compared: (x+1)^2 and x^2+2x+1 are two
    ballots.
    """
    if place == "text":
        answer = text.strip()
    else:
        found = extract_answer(text, place)
        answer = "" if found is None or found.hedged else found.value
    if not answer:
        return None
    written = strip_spaces(normalize_answer(answer))
    number = parse_quantity(normalize_answer(answer)) if len(answer) <= _LONGEST else None
    return (written or None) if number is None else str(number.value)
