"""Answers in phrasings that were judged wrongly: equations, lists, retractions, eliminations, shares, marks."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill_grading import MathGrader, SchoolGrader, SchoolQuestion

FRUIT = {"A": "apple", "B": "banana", "C": "cherry", "D": "date"}
MATH: list[tuple[str, str, bool]] = [
    ("12", "The line has equation 3x + 2y = 12.", False),
    ("3x+2y=12", "The line has equation 3x + 2y = 12.", True),
    ("7", "The plane's equation is 2x - y + 3z = 7.", False),
    ("2x-y+3z=7", "The plane's equation is 2x - y + 3z = 7.", True),
    ("25", "The circle is x^2 + y^2 = 25.", False),
    ("x^2+y^2=25", "The circle is x^2 + y^2 = 25.", True),
    ("25", "The curve satisfies x^2 + y^2 = 25.", False),
    ("25", "This simplifies to the equation x^2+y^2=25.", False),
    ("25", "The circle is $x^2 + y^2 = 25$.", False),
    ("12", "\\boxed{3x+2y=12}", False),
    ("12", "3 + 9 = 12", True),
    ("12", "Total = 12", True),
    ("12", "So x + y = 12.", True),
    ("12", "So f(3) = 12.", True),
    ("12", "The area is A = bh = 12.", True),
    ("42", "There's no way the result is 42.", False),
    ("12", "每人分得12块糖，还余3块。", True),
    ("3", "每人分得12块糖，还余3块。", False),
    ("(2,3)", "The two curves cross at the point (2, 3).", True),
    ("(2,3)", "The lines meet at the point (2, 3).", True),
    ("(2,3)", "The lines do not meet at the point (2, 3).", False),
    ("13", "12 is wrong, the correct answer is 13.", True),
    ("12", "12 is wrong, the correct answer is 13.", False),
    ("13", "If 12 is wrong, the correct answer is 13.", False),
    ("12", "There is no way to do it with fewer than 12.", False),
    ("12", "ANSWER IS: 12!!!", True),
    ("12", "The answer is 12!!", True),
    ("12", "12！", True),
    ("12!", "The answer is $12!$", True),
    ("13", "之前算的12有误，正确结果是13。", True),
    ("12", "之前算的12有误，正确结果是13。", False),
    ("x=-1,\\ x=3", "The solutions are:\n- x = -1\n- x = 3", True),
    ("3", "The solutions are:\n- x = -1\n- x = 3", False),
    ("6:8", "The ratio is 3 to 4.", True),
    ("6:8", "The ratio is 4 to 3.", False),
    ("6:30", "It is 6 to 30.", False),
    ("\\text{Evelyn}", "Thus $\\text{Evelyn}$ covered the greatest average speed.", True),
    ("\\text{Evelyn}", "It is not $\\text{Evelyn}$.", False),
]
SCHOOL: list[tuple[str, Any, str, bool]] = [
    ("numeric", "12", "他们班一共有12名女生，占全班的40%。", True),
    ("numeric", "40%", "他们班一共有12名女生，占全班的40%。", False),
    ("single", "C", "本题选C，A、B、D均不符合题意。", True),
    ("single", "C", "We eliminate A, B, and D, so C remains.", True),
    ("single", "D", "We eliminate A, B, and D, so C remains.", False),
    ("single", "C", "It's not A, B or D, so it has to be C!", True),
    ("single", "C", "C is the only statement consistent with the data; A, B and D all contradict it.", True),
    ("single", "C", "Option A can be ruled out, and B and D are false as well. That leaves C.", True),
    ("single", "C", "C does not fit. A, B and D are wrong.", False),
    ("single", "C", "A, B and D are wrong, so maybe C.", False),
    ("single", "A", "B and C are wrong; A, too. Then D is wrong as well.", False),
    ("single", "C", "I'd say B... actually no, C.", True),
    ("single", "B", "I'd say B... actually no, C.", False),
    ("single", "C", "The answer is B. Actually no, C.", True),
    ("single", "C", "It could be B or, actually, C", False),
    ("multiple", "AC", "Everything except B and D.", True),
    ("multiple", "ACD", "All options except B are correct.", True),
    ("multiple", "B", "All options except B are correct.", False),
    ("multiple", "AC", "Everything except B and D is wrong.", False),
    ("blank", ["5", "10"], "填5和10", True),
    ("blank", ["5", "10"], "5和10和3", False),
    ("true_false", False, "This claim does not hold.", True),
    ("true_false", True, "The claim holds.", True),
    ("true_false", False, "The cup holds 5 L, so false.", True),
    ("true_false", False, "题目中的说法有误。", True),
    ("true_false", True, "该说法没有误", True),
    ("ordering", "BADC", "B comes first, followed by A, then D, and C is last.", True),
    ("ordering", "CBAD", "C is last, B is first, then A, D", False),
    ("ordering", "BADC", "顺序依次为B、A、D、C。", True),
    ("numeric", "750千克", "1吨稻谷可碾米七百五十千克。", True),
    ("numeric", "1750克", "1吨稻谷可碾米七百五十千克。", False),
]


@pytest.mark.parametrize(("gold", "text", "right"), MATH)
def test_math(math: MathGrader, gold: str, text: str, right: bool) -> None:
    assert math.grade(text, gold).correct is right


@pytest.mark.parametrize(("kind", "gold", "text", "right"), SCHOOL)
def test_school(school: SchoolGrader, kind: Any, gold: Any, text: str, right: bool) -> None:
    options = FRUIT if kind in ("single", "multiple") else None
    assert school.grade(text, SchoolQuestion(gold, kind, options)).correct is right


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("Given $x + y = 7$ and $xy = 12$, find $x^2 + y^2$.", True),
        ("Which circle has radius 5? It is like $x^2 + y^2 = 9$.", False),
    ],
)
def test_an_equation_is_a_value_if_the_question_asks_for_its_left_side(
    math: MathGrader, question: str, right: bool
) -> None:
    for prompt in (question, [{"role": "user", "content": question}]):
        assert math.grade("So $x^2+y^2=25$.", "25", question=prompt).correct is right
