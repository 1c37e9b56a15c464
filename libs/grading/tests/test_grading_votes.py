"""The answer that a completion votes for."""

from __future__ import annotations

import pytest

from rollmill_grading.extraction import normalize_vote


@pytest.mark.parametrize(
    ("one", "other"),
    [("\\boxed{0.5}", "so \\boxed{\\frac{1}{2}}"), ("#### 1,000", "#### 1000"), ("\\boxed{x + 1}", "\\boxed{x+1}")],
)
def test_equal_answers_are_one_ballot(one: str, other: str) -> None:
    assert normalize_vote(one, "auto") == normalize_vote(other, "auto") != None  # noqa: E711


def test_other_answers_are_others() -> None:
    assert (
        len({normalize_vote(text, "auto") for text in ("\\boxed{1/3}", "\\boxed{0.333}", "\\boxed{x}", "\\boxed{-3}")})
        == 4
    )


def test_who_says_nothing_does_not_vote() -> None:
    assert normalize_vote("I do not know", "boxed") is None
    assert normalize_vote("  ", "text") is None
    assert normalize_vote("Yes. ", "text") == normalize_vote("Yes", "text")
