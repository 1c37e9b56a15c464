"""Mathematics: tricky pairs, real gold answers, text that would run for hours."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_grading import GradingError, MathGrader, Verdict
from rollmill_grading.comparison import compare_texts
from rollmill_grading.extraction import extract_answer
from rollmill_grading.quantities import normalize_answer, parse_quantity


def box(text: str) -> str:
    return f"So the answer is $\\boxed{{{text}}}$."


SAME = [
    ("42", "so it is 42 apples"),
    ("42", "The answer is 42 apples."),
    ("42", "The answer is $42.00."),
    ("42", box("6*7=42")),
    ("42", box(r"6 \cdot 7 = 42")),
    (72, "#### 72"),
    (72, "#### 72.0"),
    ("1,234", box("1234")),
    ("1234", "#### $1,234"),
    ("1000000", box(r"1\,000\,000")),
    ("6.02e23", box(r"6.02 \times 10^{23}")),
    ("1e3", box("1000")),
    (0.1 + 0.2, box("0.3")),
    (0.1 + 0.2, box("x = 0.3")),
    (1e-7, box(r"10^{-7}")),
    (1e-7, box(r"\frac{1}{10^7}")),
    ("1000", box("10^3")),
    ("-5", box("−5")),
    ("50%", box(r"50\%")),
    ("50%", box("0.5")),
    ("50", box(r"50\%")),
    ("90", box(r"90^\circ")),
    ("5", box(r"5\text{ cm}")),
    ("5", box("x=5")),
    ("x=5", box("5")),
    ("1/2", r"we get $\frac{1}{2}$."),
    ("1/3", "The answer is 1/3."),
    (r"1\frac{1}{2}", box("1.5")),
    ("1 1/2", box("3/2")),
    (r"\frac{1}{3}", box(r"\frac{1}{3} \approx 0.333")),
    (r"2\sqrt{3}", "we get $2\\sqrt{3}$."),
    (r"2\sqrt{3}", box(r"\sqrt{12}")),
    (r"\frac{\pi}{2}", box(r"\pi/2")),
    ("x+1", box("1+x")),
    ("x^2", box("x**2")),
    ("5", "**5** apples"),
    (r"2\sqrt{3}", box("sqrt(12)")),
    (r"2\pi", box("2 * pi")),
    ("x^2-1", box("(x-1)(x+1)")),
    ("3+4i", box("4i+3")),
    ("10!", box("3628800")),
    (r"\{1,2\}", box("1,2")),
    ("2,3", r"\boxed{2} and \boxed{3}"),
    ("(1,2)", box("(1, 2)")),
    (r"(-\infty, 5]", box(r"x \le 5")),
    ("5", r"First \boxed{4}. No, that forgets one: \boxed{5}"),
    ("5", "#### 5\n\nSo that is it."),
    ("8", "5 + 3 = 8"),
    ("12", "**Answer:** 12"),
    ("B", box("(B) 12")),
    ("(B)", box("B")),
    (r"\text{yes}", box("Yes")),
    ("solution ... #### 72", box("72")),
]
DIFFERENT = [
    ("5", box(r"\{5\}")),
    ("5", box("[5,5]")),
    ("5", box("6 = 5")),
    ("5", box(r"5 \approx 6")),
    ("5", box(r"5 \pm 1")),
    ("5", box(r"x \in \{5\}")),
    ("5", box("5x")),
    ("5", box("5 or so")),
    ("2", box("2pi")),
    (r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}", box("2")),
    ("5", r"\boxed{4} or \boxed{5}"),
    ("42", "41 or 42"),
    ("42", "The answer is 41 or 42."),
    ("42", r"$\boxed{42}$ or $\boxed{41}$"),
    ("42", box(r"6 \cdot 8 = 42")),
    ("8", "5 + 4 = 8"),
    ("(1,2)", box("1,2")),
    ("(1,2)", box("(2,1)")),
    ("[1,2)", box("[1,2]")),
    (r"x \le 5", box("x < 5")),
    ("12 inches", box("12 feet")),
    (r"\frac{1}{3}", box("0.33333333")),
    ("0.333", box(r"\frac13")),
    (r"\sqrt{2}", box("1.41421356")),
    (r"\pi", box("3.14")),
    ("2", r"we get $\frac{1}{2}$."),
    ("3", "we get $2\\sqrt{3}$."),
    ("Monday", box("Friday")),
    ("no", box("on")),
    ("B", box("C")),
    ("1 - x", box("x - 1")),
    (72, "#### 73"),
    (0.3, box("6 = 0.3")),
    (0.3, box("1e999")),
    ("5", ""),
]


@pytest.mark.parametrize(("gold", "text"), SAME)
def test_same_answers_are_accepted(math: MathGrader, gold: str | float, text: str) -> None:
    assert math.grade(text, gold).score == 1.0


@pytest.mark.parametrize(("gold", "text"), DIFFERENT)
def test_different_answers_are_refused(math: MathGrader, gold: str | float, text: str) -> None:
    assert math.grade(text, gold).score == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_gsm8k_solution_earns_its_own_answer_and_no_other(data_dir: Path, math: MathGrader, every: int) -> None:
    solutions = [json.loads(line)["answer"] for line in (data_dir / "gsm8k/train.jsonl").open(encoding="utf-8")]
    answers = [solution.rpartition("#### ")[2] for solution in solutions]
    assert len(solutions) == 7473
    rng = random.Random(0)
    pairs = [(rng.randrange(len(solutions)), rng.randrange(len(solutions))) for _ in range(6000)]
    mismatched = [(a, b) for a, b in pairs if answers[a].replace(",", "") != answers[b].replace(",", "")][:5000]
    assert len(mismatched) == 5000

    own = [each.score for each in math.grade_all(solutions[::every], answers[::every])]
    chosen = mismatched[::every]
    found = math.grade_all([solutions[b] for _, b in chosen], [answers[a] for a, _ in chosen])
    other = [each.score for each in found]
    assert own == [1.0] * len(range(0, 7473, every))
    assert other == [0.0] * len(range(0, 5000, every))


def _value(text: str, place: str) -> str | None:
    found = extract_answer(text, place)  # type: ignore[arg-type]
    return None if found is None else found.value


def test_places_of_the_answer() -> None:
    text = "I get 3.\n\\boxed{4} \\fbox{\\frac{1}{2}}\n#### 5\nThe answer is 6. Total 7"
    found = [_value(text, place) for place in ("boxed", "hash", "last_number", "auto")]
    assert found == ["4, \\frac{1}{2}", "5", "7", "4, \\frac{1}{2}"]
    assert _value(text.partition("####")[2], "auto") == "6"
    assert extract_answer("no box", "boxed") is None
    missing = MathGrader().grade("#### 5", "5", extract="boxed")
    assert (missing.score, missing.outcome, missing.correct) == (0.0, "no_answer", False)


_SCRAPS = [
    "\\boxed{",
    "\\boxed",
    "{",
    "}",
    "####",
    "answer is ",
    "$",
    "\\frac{1}{2}",
    "1,000",
    " or ",
    "\n",
    "= ",
    "/0",
]
_TEXT = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(_SCRAPS), st.text(max_size=5))).map("".join))


@settings(max_examples=300, deadline=None)
@given(_TEXT, st.sampled_from(["auto", "boxed", "hash", "last_number"]))
def test_extraction_and_comparison_never_raise(text: str, place: str) -> None:
    found = extract_answer(text, place)  # type: ignore[arg-type]
    if found is not None:
        answer = found.value
        compare_texts("5", answer)
        compare_texts(answer, "5")
        parse_quantity(normalize_answer(answer))


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_numbers_are_compared_exactly(gold: int, other: int) -> None:
    for text in (f"{other}", f"{other:,}", f"{other}.00", f"${other}", f"{other} apples"):
        assert compare_texts(str(gold), text) is (gold == other)


def test_a_reference_that_is_none_is_an_error(math: MathGrader) -> None:
    with pytest.raises(GradingError, match=r"the reference is \[5\] \(list\); give text or a number"):
        math.grade("5", [5])  # type: ignore[arg-type]
    with pytest.raises(GradingError, match="the reference is empty"):
        math.grade(r"\boxed{}", "  ")


PATHOLOGICAL = {
    "tower": box("9^{9^{9^{9}}}"),
    "factorial": box("(10^9)!"),
    "long number": box("9" * 300 + "^" + "9" * 300),
    "exponent": box("1e999999999"),
    "braces": box("{" * 3000 + "1" + "}" * 3000),
    "open boxes": "\\boxed{" * 3000 + "1",
    "nested boxes": "\\boxed{" * 3000 + "1" + "}" * 3000,
    "terms": box("+".join(f"\\sqrt{{{n}}}" for n in range(1500))),
    "polynomial": box("+".join(f"x^{{{n}}}" for n in range(250))),
    "fractions": box("\\frac{1}{" * 150 + "2" + "}" * 150),
}


@pytest.mark.slow
def test_endless_answers_end_in_time_and_block_nobody() -> None:
    """From a thread that is not the main one, with the event loop ticking all the while."""
    scores: dict[str, float] = {}
    outcomes: dict[str, str] = {}
    ticks: list[None] = []

    async def grade_everything() -> None:
        with MathGrader(workers=2, time_limit_s=2.0) as grader:

            async def one(name: str) -> None:
                # a reference of the same form lifts the cap on cost, so that the grader process has to be ended
                gold = "9^{9^{9^{8}}}" if name == "tower" else r"\sqrt{2}"
                begun = grader.begin(PATHOLOGICAL[name], gold)
                found = begun if isinstance(begun, Verdict) else await begun
                scores[name], outcomes[name] = found.score, found.outcome

            async def tick() -> None:
                while True:
                    await asyncio.sleep(0.01)
                    ticks.append(None)

            ticking = asyncio.ensure_future(tick())
            await asyncio.gather(*map(one, PATHOLOGICAL))
            ticking.cancel()
            after = grader.begin(box(r"\sqrt{12}"), r"2\sqrt{3}")
            assert not isinstance(after, Verdict)
            scores["after"] = (await after).score

    thread = threading.Thread(target=lambda: asyncio.run(grade_everything()))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert scores.pop("after") == 1.0
    assert scores == dict.fromkeys(PATHOLOGICAL, 0.0)
    assert outcomes["tower"] == "timeout"
    assert outcomes["fractions"] == "too_deep"
    assert len(ticks) > 20
