"""The math reward on equations, names that look like units, intervals and complex numbers; and its limit of work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grading_bench.answer_mutants import mutants, rewritings
from grading_bench.corpus import accepted_by_library, counts

from rollmill_grading import MathGrader
from rollmill_grading.algebra import compare_formulas
from rollmill_grading.pristine import PristineProcess

EQUATIONS = [
    ("2+2=4", "2+2=5", False),
    ("2+2=4", "4=2+2", True),
    ("2+2=4", "1+3=4", True),
    ("2+2=4", "2+2=3+1=4", True),
    (r"\sqrt{16}=4", r"\sqrt{16}=5", False),
    (r"\int_0^1 x dx=\frac12", r"\int_0^1 x dx=1", False),
    (r"\int_0^1 x dx=\frac12", r"\int_0^1 x dx=0.5", True),
    ("x^2+1=0", "e^x=-1", False),
    ("x^2+1=0", "x^2+4=0", False),
    ("x^2+1=0", "2x^2+2=0", True),
    ("x^2+1=0", "x^2=-1", True),
    ("y=2x+1", "2x-y+1=0", True),
    ("y=2x+1", "y=2x+2", False),
    ("y=2x+1", "2x+1=y", True),
    ("y=2x", r"\frac{y}{x}=2", True),
    ("y=2x", "y=2x=3x", False),
    ("y=2x", "x=2y", False),
    ("x=0", "x^2=0", True),
    ("x=1", "(x-1)(x+2)=0", False),
    (r"\frac{\sqrt{3} x^2}{3}-y^2=1", r"\sqrt{3} x^2-3y^2=3", True),
    (r"\frac{\sqrt{3} x^2}{3}-y^2=1", r"\sqrt{3} x^2-3y^2=1", False),
    ("x=194", "x+1=194", False),
    ("x=194", "2(x)=194", False),
    ("x=194", "194=x", True),
    ("x=194", "x-(194)=0", True),
    ("x=194", "2x=388", True),
    (r"\sqrt{x}=2", "x=4", True),
    (r"\sqrt{x}=2", "x=-4", False),
    (r"x=\pm 2", "x=2 or x=-2", True),
    (r"x=\pm 2", "x=2 or x=-3", False),
    (r"\tan(\alpha+\beta)=1", r"1=\tan(\alpha+\beta)", True),
    (r"\tan(\alpha+\beta)=1", r"1=\tan(\alpha-\beta)", False),
    (r"\frac{dy}{dx}=3x", r"\frac{dy}{dx}=2x", False),
    (r"\frac{dy}{dx}=3x", r"\frac{dy}{dx}=x+2x", True),
    (r"\frac{dy}{dx}-3x=0", r"\frac{dy}{dx}-2x=0", False),
    (r"\frac{dy}{dx}-3x=0", r"3x-\frac{dy}{dx}=0", True),
    (r"\frac{\partial u}{\partial x}=3x", r"\frac{\partial u}{\partial x}=2x", False),
    ("y'-3x=0", "y-3x=0", False),
    (r"\cos(e)\approx -.912", r"\cos(e)\approx .912", False),
    (r"\cos(e)\approx -.912", r"\cos(e)\approx -.91", True),
    (r"\sqrt{2}", r"\sqrt{2}\approx 1.4142", True),
    (r"\sqrt{2}", r"\sqrt{2}\approx 1.5", False),
    ("3<m<4", "4>m>3", True),
    ("3<m<4", "3>m>4", False),
    (r"3\le m<4", r"4>m\ge 3", True),
    (r"3\le m<4", r"4\ge m>3", False),
    (r"\frac13 E_{1}+\frac23 E_{2}", r"\frac23 E_{2}+\frac13 E_{1}", True),
    (r"\frac13 E_{1}+\frac23 E_{2}", r"\frac13 E_{2}+\frac23 E_{1}", False),
]
VARIABLES = [
    ("5ab", "5", False),
    ("5", "5ab", False),
    ("5ab", "5ba", True),
    (r"2\pi ab", r"2\pi cd", False),
    (r"2\pi ab", r"2\pi", False),
    ("2 n!", "2", False),
    ("2", "2 n!", False),
    ("-9.8t", "-9.8", False),
    ("-9.8 t", "-9.8", False),
    ("7 mn", "7", False),
    ("6 rs", "6", False),
    ("3xyz", "3", False),
    ("720", "3(240)", True),
    ("243", "3(240)", False),
    ("7", "3[4]", False),
    ("12", "3[4]", True),
    (r"2\pi h", r"2\pi", False),
    ("4 h", "4", True),
    ("105000", "3(35,000)", True),
    ("5 m", "5", True),
    ("20 pcs", "20", True),
    ("15 cc", "15", True),
    ("8 GB", "8", True),
    ("3x+2", r"3x + 2 \text{ square units}", True),
    ("3x+2", "(3x + 2) cm", True),
    ("(3x+2) cm", "(3x + 2) m", False),
    (r"t^2 \text{ seconds}", "t^2", True),
]
SETS = [
    (r"(-\infty,\infty)", r"\mathbb{R}", True),
    (r"(-\infty,\infty)", r"x \in \mathbb{R}", True),
    (r"\mathbb{R}", r"(-\infty,+\infty)", True),
    (r"(-\infty,3)", r"\mathbb{R}", False),
    (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2\}", True),
    (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{3\}", False),
    (r"(-\infty,-1)\cup(-1,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2,-1\}", True),
    ("-1", "i^2", True),
    ("1", "i^2", False),
    ("2i", r"\sqrt{-4}", True),
    ("-2i", r"\sqrt{-4}", False),
    ("x+2i", "2i+x", True),
]


@pytest.mark.parametrize(("gold", "answer", "right"), [*EQUATIONS, *VARIABLES, *SETS])
def test_boxed(math: MathGrader, gold: str, answer: str, right: bool) -> None:
    assert math.grade(f"\\boxed{{{answer}}}", gold).score == float(right)


@pytest.mark.parametrize("between", [r" \quad ", r" \qquad ", r" \\ ", r" \; ", r",\ ", "\n", ", ", " and "])
def test_every_statement_of_an_answer_counts(math: MathGrader, between: str) -> None:
    gold = f"x=1,000{between}y=2"
    assert math.grade(f"\\boxed{{x=1000{between}y=2}}", gold).score == 1.0
    assert math.grade(f"\\boxed{{x=5{between}y=2}}", gold).score == 0.0
    assert math.grade(f"\\boxed{{x=1000{between}y=3}}", gold).score == 0.0


@pytest.mark.parametrize(("gold", "answer"), [("5ab", "5"), (r"2\pi ab", r"2\pi cd"), ("-9.8t", "-9.8"), ("5 m", "5")])
def test_no_variable_is_a_unit_where_units_are_required(math: MathGrader, gold: str, answer: str) -> None:
    assert math.grade(f"\\boxed{{{answer}}}", gold, units="required").score == 0.0


HEAVY = (r"\tan(\alpha+\beta)+1=0", r"\tan(\alpha-\beta)+1=0")


def test_a_comparison_is_limited_by_its_steps() -> None:
    golds, answers = [r"\sqrt{x}=2"], [r"\sqrt{x}=3"]
    assert compare_formulas(golds, answers) == 0.0
    assert compare_formulas(golds, answers, max_steps=1000) == "too_costly"
    assert compare_formulas([r"\sqrt{x}=2"], ["x=4"], max_steps=1000) == "too_costly"
    assert compare_formulas([r"\sqrt{x}=2"], ["x=4"]) == 1.0
    assert compare_formulas(["2x+2"], ["2(x+1)"], max_steps=0) == 1.0  # values decide, without any algebra


@pytest.mark.slow
def test_an_answer_beyond_the_limit_earns_nothing(math: MathGrader) -> None:
    gold, answer = r"\sin x+\sin y=\sqrt{3}", r"\cos(xy)+\tan(x-y)+\ln(x+y)=\sqrt{2}"
    found = math.grade(f"\\boxed{{{answer}}}", gold)
    assert (found.score, found.outcome) == (0.0, "too_costly")


def test_a_pristine_process_remembers_no_call() -> None:
    seen: list[int] = []

    def count(number: int) -> int:
        if number < 0:
            raise (MemoryError if number == -1 else ValueError("negative"))
        seen.append(number)
        return len(seen)

    process = PristineProcess(count, lambda: seen.append(0))
    assert [process.call(1), process.call(2)] == [2, 2]
    assert seen == []
    with pytest.raises(MemoryError):
        process.call(-1)
    with pytest.raises(RuntimeError, match="negative"):
        process.call(-2)
    assert process.call(3) == 2


@pytest.mark.slow
def test_verdicts_are_the_same_on_a_busy_machine() -> None:
    pairs = [HEAVY, ("y=2x", "y=3x"), ("x^2+1=0", "e^x=-1"), (r"\sin 2x<0", r"\sin 3x<0"), (r"\sqrt{x}=2", "x=4")]

    def verdicts() -> list[tuple[float, str]]:
        with MathGrader() as grader:
            golds, answers = zip(*pairs, strict=True)
            found = grader.grade_all([f"\\boxed{{{answer}}}" for answer in answers], golds)
        return [(each.score, each.outcome) for each in found]

    idle = verdicts()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        assert verdicts() == idle
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert not {"timeout", "memory"} & {outcome for _, outcome in idle}


@pytest.mark.slow
@pytest.mark.parametrize("every", [45, pytest.param(5, marks=pytest.mark.thorough)])
def test_of_a_thousand_mutated_references_three_at_most_are_accepted(data_dir: Path, every: int) -> None:
    rows = mutants(data_dir)
    assert len(rows) >= 3000
    assert len({row.group for row in rows}) >= 25
    part = rows[::every]
    _, accepted = counts(part, accepted_by_library(part))
    assert accepted <= 3 * len(part) / 1000


@pytest.mark.slow
def test_rewritten_references_are_accepted(data_dir: Path) -> None:
    part = rewritings(data_dir)[::5]
    rejected, _ = counts(part, accepted_by_library(part))
    assert rejected <= 8
