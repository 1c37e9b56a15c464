"""The math reward: extract the final answer, compare cheaply, and ask math-verify in a grader process for the rest.

math-verify accepts a set, an interval or a false equation for a number, so what an answer is made of is told here
first: every side of an equation has to equal the reference, and a number equals nothing but one number.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollmill.config.reward import MathReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, Verdict
from rollmill.rewards.extraction import boxed, extract, hashed
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.numbers import agree, normalised, quantity, squeezed

LONGEST_ANSWER = 2000
"""Characters; a longer answer earns 0 with the outcome `too_long`."""

_NO_SLACK, _ROUNDING, _APPROXIMATE = Fraction(0), Fraction(1, 10**9), Fraction(1, 100)
"""Relative difference allowed by text and integers, by a Python float, and behind an approximation sign."""

_SIGNS = re.compile(r"(=|≈|\\approx(?![A-Za-z]))")
_NOT_ONE_NUMBER = re.compile(
    r"[<>≤≥≠±∈∪∩;]|\\(?:leq?|geq?|l|g|neq?|pm|mp|in|cup|cap|to|lt|gt|leqslant|geqslant|subset)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?:or|and)(?![A-Za-z])",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|phi|lambda|mu|omega|angle|triangle)")
_CHOICE = re.compile(r"\(([A-J])\)(?!\S*[+*/^])|([A-J])[.):](?=\s|$)")


class Math:
    """1 if the final answer equals the reference, else 0. A task without an answer is not judged."""

    def __init__(self, config: MathReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        if task.answer is None:
            return Verdict(None)
        gold = reference(task.answer)
        answer = extract(completion.text, self._config.extract)
        if answer is None:
            return Verdict(0.0, "no_answer")
        if squeezed(normalised(answer)) == squeezed(normalised(gold)):
            return Verdict(1.0)
        if len(answer) > LONGEST_ANSWER:
            return Verdict(0.0, "too_long")
        return await self._compared(gold, answer, slack=_ROUNDING if isinstance(task.answer, float) else _NO_SLACK)

    async def _compared(self, gold: str, answer: str, *, slack: Fraction) -> Verdict:
        questions = settle(gold, answer, slack=slack)
        for question in questions if isinstance(questions, list) else []:
            payload = {"gold": _latex(normalised(gold)), "answer": _latex(question)}
            reply = await self._graders.ask("math", payload, self._config.time_limit_s)
            if reply.outcome != OK:
                return Verdict(self._config.timeout_reward, reply.outcome)
            if reply.value != 1.0:
                return Verdict(0.0)
        return Verdict(float(questions is not False))


def reference(answer: object) -> str:
    """The reference as text; of a worked solution only its last \\boxed{} or what follows "####".

    Raises TypeError when it is neither text nor a number.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    text = str(answer)
    return boxed(text) or hashed(text) or text


def settle(gold: str, answer: str, *, slack: Fraction = _NO_SLACK) -> bool | list[str]:
    """True or False where text and plain numbers decide; else the expressions that must all equal the reference.

    `slack` is the relative difference that plain numbers may have.
    """
    gold, answer = normalised(gold), normalised(answer)
    if re.fullmatch(r"\(?([A-J])\)?", gold):
        choice = _CHOICE.match(answer)
        letter = next(filter(None, choice.groups())) if choice else squeezed(answer).strip("()").upper()
        return letter == gold.strip("()")
    if _is_words(gold):
        return squeezed(gold).casefold() == squeezed(answer).casefold()
    if _SIGNS.search(gold):
        return [answer] if answer else False
    if _is_ordered(gold) and not _is_ordered(answer) and _has_list_comma(answer):
        return False
    return _settle_sides(gold, answer, slack)


def _settle_sides(gold: str, answer: str, slack: Fraction) -> bool | list[str]:
    number = quantity(gold)
    pieces = [piece.strip() for piece in _SIGNS.split(answer)]
    sides = list(zip(["=", *pieces[1::2]], pieces[::2], strict=True))
    if len(sides) > 1 and _LETTER.search(sides[0][1]):
        sides = [("=", sides[1][1]), *sides[2:]]
    unknown = []
    for sign, side in sides:
        if not side or (number is not None and not _may_be_one_number(side)):
            return False
        found = quantity(side)
        if number is not None and found is not None:
            if not agree(number, found, slack=slack if sign == "=" else _APPROXIMATE):
                return False
        elif sign == "=":
            unknown.append(side)
    return unknown or True


def _may_be_one_number(text: str) -> bool:
    bracketed = re.fullmatch(r"\\\{.*\\\}|\[.*\]|\{.*\}|\(.*,.*\)", text) is not None
    return not bracketed and not _NOT_ONE_NUMBER.search(text) and not _has_list_comma(text)


def _has_list_comma(text: str) -> bool:
    """Whether a comma outside brackets separates several answers (and not thousands)."""
    depth = 0
    for character in re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            return True
    return False


def _is_ordered(text: str) -> bool:
    """Whether it is written as a pair, a tuple or an interval."""
    return re.fullmatch(r"[(\[].*,.*[)\]].*", text) is not None


def _is_words(text: str) -> bool:
    """Whether it is plain language and no product of variables: letters with a vowel, no digits, no formula."""
    if re.fullmatch(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*", text) is None:
        return False
    return not text.isascii() or text.lower() == "no" or re.search(r"(?i)(?=\w*[aeiou])\w{3}", text) is not None


def _latex(text: str) -> str:
    """The text as LaTeX that math-verify reads: sqrt(2), pi and 1e-7 are common in answers too."""
    text = re.sub(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(\d)[eE]([+-]?\d+)", r"\1 \\times 10^{\2}", text)
    return text.replace("%", "\\%").replace("°", "^{\\circ}")
