"""Whether a value is the reference: words, numbers with units, formulas."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rollmill.errors import RewardError
from rollmill.rewards.answers.collection import RELATION
from rollmill.rewards.answers.comparison import CALL_EQUATION, AnswerMatchOptions
from rollmill.rewards.answers.complexity import oversize_outcome
from rollmill.rewards.answers.normalization import comparison_key, has_cjk, parse_circled_digit
from rollmill.rewards.answers.quantities import normalize_answer
from rollmill.rewards.answers.symbolic import compare_answers
from rollmill.rewards.base import OK
from rollmill.rewards.grader_pool import GraderPool, GraderResult
from rollmill.rewards.k12.amounts import Amount, amounts_equal, parse_amount, unit_word
from rollmill.rewards.k12.unit_words import load_pint, parse_units

_ROUGHLY_SAID = re.compile(r"^[\s$]*(?:=>?|\\approx(?![A-Za-z])|≈|约(?:为|是)?|about|approximately)\s*")
_IN_WORDS = {"或者": " or ", "或": " or ", "且": " and ", "和": ", ", "、": ", "}
_BEHIND = re.compile(r"(?<=[\d})])\s*\(\s*[^\W\d_]{1,3}\s*\)\s*$")
_NAME = re.compile(r"^[^\d=≈]{1,40}?(?=[=≈])")
_LABELS = re.compile(r"(?:[①-⑳]|\(\d{1,2}\))(?:\s*(?:[,、和;]|and)?\s*(?:[①-⑳]|\(\d{1,2}\)))*")
_ONE_LABEL = re.compile(r"[①-⑳]|\d{1,2}")
_EQUALS = re.compile(r"(=|≈|\\approx(?![A-Za-z]))")
_COMMAND = re.compile(r"\\(?:times|cdot|div|frac|left|right)(?![A-Za-z])")
_MOST_SIDES = 12
_ROUGHLY = Fraction(1, 100)
"""Relative difference allowed before an approximation sign."""


@dataclass(frozen=True, slots=True)
class ValueMatchOptions:
    """How values are compared. `time_limit_s` holds for each formula."""

    graders: GraderPool
    time_limit_s: float
    slack: Fraction = Fraction(0)
    absolute: Fraction = Fraction(0)
    units_required: bool = False

    @property
    def rules(self) -> AnswerMatchOptions:
        return AnswerMatchOptions(self.slack, units_required=self.units_required)


def reference_amount(gold: str, unit: str | None) -> Amount | None:
    """The amount that a reference is, in the unit of the task. Raises RewardError where its own is another one."""
    found = parse_amount(gold)
    if found is None or unit is None:
        return found
    known = parse_units(unit)
    if found.units and not set(found.units) & set(known):
        raise RewardError(f"its answer is {gold!r:.80}, but `k12.unit` is {unit}; leave out one of the two units")
    return replace(found, units=known, word="" if known else unit_word(unit))


async def compare_value(
    gold: str, text: str, value: str, gauge: ValueMatchOptions, *, unit: str | None = None
) -> GraderResult:
    """1 where an answer is the reference, else 0; the outcome is not "ok" where a formula took too long.

    Args:
        gold: the reference, folded; `text` and `value` also.
        text: the answer as it is written.
        value: what it names.
        unit: the unit of the reference, where its text has none.
    """
    want = reference_amount(gold, unit)
    if (
        comparison_key(gold) in (comparison_key(text), comparison_key(value))
        and comparison_key(gold)
        and not (gauge.units_required and want is not None)
    ):
        return GraderResult(OK, 1.0)
    if (outcome := oversize_outcome(text)) is not None:
        return GraderResult(outcome)
    if _LABELS.fullmatch(gold.strip(" $")):
        return GraderResult(OK, float(_labels(gold) in (_labels(text), _labels(value))))
    answer = _ROUGHLY_SAID.sub("", value.strip(), count=1)
    got = parse_amount(answer)
    if want is not None and got is not None:
        return GraderResult(OK, float(await _same(want, got, gauge)))
    answer = CALL_EQUATION.sub("", answer.strip(" $"), count=1) if CALL_EQUATION.match(answer.strip(" $")) else answer
    if want is not None and _EQUALS.search(answer) and not RELATION.search(normalize_answer(answer)):
        return await _chain(want, normalize_answer(answer), gauge)
    return await _formula(gold, answer, gauge)


async def _chain(want: Amount, answer: str, gauge: ValueMatchOptions) -> GraderResult:
    """`99 - 90 = 9 pages`: the last side is the answer, and every other side of plain numbers has to be equal to it."""
    sides, signs = _EQUALS.split(answer)[::2], _EQUALS.findall(answer)
    got = parse_amount(sides[-1])
    if got is None or len(sides) > _MOST_SIDES:
        return GraderResult(OK, 0.0)
    plain = str(got.value / 100 if got.percent else got.value)
    found = GraderResult(OK, float(await _same(want, got, gauge)))
    for index, side in enumerate(sides[:-1]):
        if found.outcome != OK or not found.value:
            break
        exact = all(sign == "=" for sign in signs[index:])
        near = gauge if exact else replace(gauge, slack=max(gauge.slack, _ROUGHLY))
        part = parse_amount(side)
        if part is not None:
            found = replace(found, value=float(await _same(want, part, near)))
        elif not re.search(r"[^\W\d_]", _COMMAND.sub("", side)):
            reply = await compare_answers(plain, side, near.rules, near.graders, near.time_limit_s)
            found = replace(reply, queue_s=found.queue_s + reply.queue_s)
    return found


async def _same(want: Amount, got: Amount, gauge: ValueMatchOptions) -> bool:
    if want.units and got.units and (want.units != got.units or want.rest or got.rest):
        await asyncio.to_thread(load_pint)
    return amounts_equal(want, got, slack=gauge.slack, absolute=gauge.absolute, required=gauge.units_required)


async def _formula(gold: str, answer: str, gauge: ValueMatchOptions) -> GraderResult:
    gold, answer = _plain(gold), _plain(answer)
    if has_cjk(gold) or has_cjk(answer):
        return GraderResult(OK, float(comparison_key(gold) == comparison_key(answer)))
    if (
        comparison_key(gold) != comparison_key(answer)
        and comparison_key(gold).casefold() == comparison_key(answer).casefold()
    ):
        return GraderResult(OK, 0.0)  # a lone letter is no option here
    return await compare_answers(gold, answer, gauge.rules, gauge.graders, gauge.time_limit_s)


def _plain(text: str) -> str:
    """The formula that a text is, Chinese joining words in English, `剩下的页数 = 9` without its name."""
    text = normalize_answer(text)
    text = _BEHIND.sub("", text)
    name = _NAME.match(text)
    if name is not None and has_cjk(name[0]):
        text = text[name.end() :].lstrip("=≈ ")
    for word, sign in _IN_WORDS.items():
        text = text.replace(word, sign)
    return text


def _labels(text: str) -> set[str] | None:
    """The numbered statements that `①③④` or `(1), (3), (4)` names; None for anything else."""
    text = text.strip(" $.。")
    if not _LABELS.fullmatch(text):
        return None
    return {str(parse_circled_digit(label) or label) for label in _ONE_LABEL.findall(text)}
