"""Any text and plain numbers in every notation; text that would run for hours; tolerances and units."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_grading import MathGrader
from rollmill_grading.collection import parse_collection
from rollmill_grading.comparison import AnswerMatchOptions, compare_texts, split_option
from rollmill_grading.quantities import normalize_answer, parse_quantity, parse_unit, strip_spaces

_SCRAPS = [
    *("\\boxed{", "{", "}", "(", ")", "[", "]", "\\{", "\\}", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "&"),
    *("$", "\\$", "€", "%", "°", "^", "_", "/", "/0", ":", ",", ";", "=", "\\approx", "<", "\\le", "|", "\\mid"),
    *(" or ", " and ", "\\cup", "\\pm", "\\frac", "\\frac{1}{2}", "\\frac12", "\\overline{", "\\text{", "sqrt"),
    *(
        "1,000",
        "1 000",
        "1e999",
        "e5",
        "10^",
        "-",
        "+",
        "0",
        "7",
        ".",
        "x",
        "x = ",
        "m",
        " cm",
        " km/h",
        "square ",
        "(B)",
    ),
    *("\n", " ", "\\,", "\\ "),
]
_TEXT = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(_SCRAPS), st.text(max_size=3))).map("".join))
_NUMBERS = st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**4)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(_TEXT, _TEXT)
def test_comparing_any_text_never_raises(gold: str, answer: str) -> None:
    found = compare_texts(gold, answer)
    assert isinstance(found, bool) or found
    assert compare_texts(answer, answer) is True
    text = normalize_answer(answer)
    parse_quantity(text), parse_collection(text), split_option(text), parse_unit(text), strip_spaces(text)


def _written(value: Fraction) -> list[str]:
    """A number in every notation that is exact for it."""
    sign, size = "-" if value < 0 else "", abs(value)
    top, bottom = size.numerator, size.denominator
    whole, rest = divmod(top, bottom)
    texts = [
        f"{sign}{top}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"${sign}\dfrac{{{2 * top}}}{{{2 * bottom}}}$",
    ]
    if rest and whole:
        texts += [f"{sign}{whole} {rest}/{bottom}", rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}"]
    if 10**8 % bottom == 0:
        digits = f"{top * 10**8 // bottom:09d}"
        exact = f"{digits[:-8]}.{digits[-8:]}"
        texts += [sign + exact, f"{sign}{digits}e-8", rf"{sign}{digits} \times 10^{{-8}}", f"{sign}{int(digits)}*10^-8"]
    if bottom == 1:
        separated = f"{sign}{top:,}"
        texts += [
            f"{sign}{top}",
            separated,
            separated.replace(",", " "),
            separated.replace(",", r"\,"),
            f"{sign}{top}.00",
        ]
    return texts


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(_NUMBERS)
def test_equal_numbers_are_accepted_in_any_notation(value: Fraction) -> None:
    texts = _written(value)
    for gold in texts:
        for answer in texts:
            assert compare_texts(gold, answer) is True, (gold, answer)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.one_of(_NUMBERS, st.integers(-100, 100).map(Fraction)), st.data())
def test_different_numbers_are_refused(value: Fraction, data: st.DataObject) -> None:
    near = st.sampled_from([value + 1, -value - 1, value * 10 + 1, value + Fraction(1, 10**4)])
    other = data.draw(st.one_of(_NUMBERS, near).filter(lambda each: each != value))
    for gold, answer in zip(_written(value), reversed(_written(other)), strict=False):
        assert compare_texts(gold, answer) is False, (gold, answer)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_plain_numbers_are_compared_alike_from_both_sides(data: st.DataObject) -> None:
    unit = st.sampled_from(["", "", r"\%", " m", " cm", " s", " m^2", " apples", " dollars", " cents"])
    number = st.integers(-20, 20).map(lambda n: Fraction(n, 2) * data.draw(st.sampled_from([1, 10, 100])))
    one, other = (data.draw(st.sampled_from(_written(data.draw(number)))) + data.draw(unit) for _ in range(2))
    assert compare_texts(one, other) == compare_texts(other, one)


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


PATHOLOGICAL = {
    "tower": "9^{9^{9^{9}}}",
    "tall tower": "2^{" * 40 + "2" + "}" * 40,
    "tower of factorials": "9!^{9!^{9!}}",
    "factorial": "(10^9)!",
    "factorial of a factorial": "((20!)!)!",
    "tower in a pair": r"(\sqrt{2}, 9^{9^{9^{9}}})",
    "tower in a set": r"\{\sqrt{2}, 9^{9^{9^{9}}}\}",
    "tower minus tower": "9^{9^{9^{9}}} - 9^{9^{9^{9}}}",
    "long power": "9" * 300 + "^" + "9" * 300,
    "root of a tower": r"\sqrt{9^{9^{9^{9}}}}",
    "binomial": r"\binom{10^9}{5 \cdot 10^8}",
    "sum": r"\sum_{k=1}^{10^{12}} \frac{1}{k^2+k}",
    "product": r"\prod_{k=1}^{10^{9}} k",
    "integral": r"\int_0^1 \sin(\cos(\tan(x^x))) dx",
    "limit": r"\lim_{x \to 0} \frac{\sin(\tan(x)) - \tan(\sin(x))}{x^{17}}",
    "exponent": "1e999999999",
    "power of ten": "10^{10^{10}}",
    "braces": "{" * 3000 + "1" + "}" * 3000,
    "short braces": "{" * 90 + "1" + "}" * 90,
    "parentheses": "(" * 900 + "1" + ")" * 900,
    "terms": "+".join(["x"] * 990),
    "1500 terms": "+".join(f"\\sqrt{{{n}}}" for n in range(1500)),
    "roots": "+".join(f"\\sqrt{{{n}}}" for n in range(180)),
    "polynomial": "+".join(f"x^{{{n}}}" for n in range(250)),
    "expansion": "(x+y+z+1)^{200}",
    "nested roots": r"\sqrt{2+" * 90 + "1" + "}" * 90,
    "fractions": r"\frac{1}{" * 90 + "2" + "}" * 90,
    "commas": "," * 1900,
    "numbers": ",".join(map(str, range(500))),
    "equals": "=".join(["5"] * 900),
    "minus": "-" * 1900 + "5",
    "dollars": "$" * 1900 + "5",
    "spaces": "1 " * 990,
    "units": "5 " + "m/" * 900 + "s",
}


@pytest.mark.slow
def test_endless_answers_are_answered_one_after_the_other() -> None:
    """With the default limit. `pytest -s` shows the seconds of each."""
    outcomes: dict[str, str] = {}
    with MathGrader() as grader:
        for name, answer in PATHOLOGICAL.items():
            grader.grade(box(r"\sqrt{3}"), r"\sqrt{2}")  # starts the process
            start = time.perf_counter()
            found = grader.grade(box(answer), r"\sqrt{2}")
            assert found.score == 0.0, name
            outcomes[name] = found.outcome
            print(f"{name:30} {outcomes[name]:8} {time.perf_counter() - start:.3f}")
    assert set(outcomes.values()) <= {"ok", "timeout", "memory", "too_long", "too_deep", "too_costly"}
    assert outcomes["tower"] == "too_costly"
    assert outcomes["braces"] == outcomes["1500 terms"] == "too_long"
    assert outcomes["parentheses"] == "too_deep"


def test_endless_references_do_not_hang_the_parent() -> None:
    for answer in PATHOLOGICAL.values():
        compare_texts(answer, r"\sqrt{2}")
        compare_texts(r"\{1, 2\}", answer)
        compare_texts("5", answer)


def test_a_tolerance_accepts_what_is_close(math: MathGrader) -> None:
    close = [("1/3", "0.3333"), (r"\sqrt{2}", "1.4142"), (r"(\pi, 1)", "(3.1416, 1.0001)"), ("100 cm", "1.0005 m")]
    far = [("1/3", "0.33"), (r"\sqrt{2}", "1.41"), (r"(\pi, 1)", "(3.1, 1)"), ("100 cm", "1.01 m"), ("0", "0.0001")]
    for pairs, score in ((close, 1.0), (far, 0.0)):
        assert [math.grade(box(answer), gold, tolerance=1e-3).score for gold, answer in pairs] == [score] * len(pairs)


def test_required_units_refuse_a_missing_one(math: MathGrader) -> None:
    pairs = [
        ("5 m", "5 m"),
        ("5 m", "500 cm"),
        ("5", "5 m"),
        ("5 m", "5"),
        ("50%", "0.5"),
        (r"2\pi \text{ m}", r"\pi 2"),
    ]
    found = [math.grade(box(answer), gold, units="required").score for gold, answer in pairs]
    assert found == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_rules_are_exact_by_default() -> None:
    assert compare_texts("1/3", "0.3333") is False
    assert compare_texts("1/3", "0.3333", AnswerMatchOptions(slack=Fraction(1, 1000))) is True
