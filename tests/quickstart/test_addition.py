"""The quickstart's task: true answers, a teacher that forgets as often as told, and sums that are really held out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rollmill.quickstart.addition import is_held_out, rows, trace


@given(st.integers(100, 999), st.integers(100, 999))
def test_a_teacher_that_forgets_nothing_is_right(a: int, b: int) -> None:
    working = trace(a, b, forget=0.0, generator=random.Random(0))
    assert working.rpartition("#")[2] == str(a + b)


@given(st.integers(100, 999), st.integers(100, 999))
def test_a_teacher_that_forgets_everything_is_right_only_without_carries(a: int, b: int) -> None:
    working = trace(a, b, forget=1.0, generator=random.Random(0))
    carries = a % 10 + b % 10 > 9 or a // 10 % 10 + b // 10 % 10 > 9
    assert (working.rpartition("#")[2] == str(a + b)) == (not carries)


def test_carries_are_forgotten_at_the_given_rate() -> None:
    made = list(rows(4000, seed=3, forget=0.7))
    carrying = [row for row in made if "=1" in row["response"].split(" ")[0]]
    forgot = sum("+0=" in row["response"].split(" ")[1] for row in carrying)
    assert abs(forgot / len(carrying) - 0.7) < 4 * (0.7 * 0.3 / len(carrying)) ** 0.5


def test_held_out_sums_never_occur_in_training() -> None:
    training = {row["prompt"] for seed in range(5) for row in rows(3000, seed=seed)}
    held_out = {row["prompt"] for seed in range(5) for row in rows(300, seed=seed, held_out=True)}
    assert not training & held_out
    assert all(is_held_out(*map(int, prompt.split("+"))) for prompt in held_out)
    assert len({row["prompt"] for row in rows(500, seed=1)}) == 500


def test_held_out_sums_look_like_the_others() -> None:
    """Were a pair of last digits, say, held out as a whole, the model would be measured on what it never saw."""
    columns = [{(a // 10**place % 10, b // 10**place % 10) for a, b in _pairs(held_out=False)} for place in range(3)]
    for a, b in _pairs(held_out=True):
        assert all((a // 10**place % 10, b // 10**place % 10) in columns[place] for place in range(3))


def _pairs(held_out: bool) -> list[tuple[int, int]]:
    return [tuple(map(int, row["prompt"].split("+"))) for row in rows(4000, held_out=held_out)]  # type: ignore[misc]
