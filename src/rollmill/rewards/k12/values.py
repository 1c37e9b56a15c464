"""Whether a value is the reference: words, numbers with units, formulas."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rollmill.core.errors import RewardError
from rollmill.rewards.answers.limits import too_much
from rollmill.rewards.answers.writing import has_cjk, key, number_of
from rollmill.rewards.base import OK
from rollmill.rewards.comparison import CALL, Rules
from rollmill.rewards.formulas import compared
from rollmill.rewards.grader import GraderPool, Reply
from rollmill.rewards.k12.amounts import Amount, amount, same, word_of
from rollmill.rewards.k12.unit_words import units, warm
from rollmill.rewards.numbers import normalised
from rollmill.rewards.structure import RELATION

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
class Gauge:
    """How values are compared. `time_limit_s` holds for each formula."""

    graders: GraderPool
    time_limit_s: float
    slack: Fraction = Fraction(0)
    absolute: Fraction = Fraction(0)
    units_required: bool = False

    @property
    def rules(self) -> Rules:
        return Rules(self.slack, units_required=self.units_required)


def reference_amount(gold: str, unit: str | None) -> Amount | None:
    """The amount that a reference is, in the unit of the task. Raises RewardError where its own is another one."""
    found = amount(gold)
    if found is None or unit is None:
        return found
    known = units(unit)
    if found.units and not set(found.units) & set(known):
        raise RewardError(f"its answer is {gold!r:.80}, but `k12.unit` is {unit}; leave out one of the two units")
    return replace(found, units=known, word="" if known else word_of(unit))


async def equal(gold: str, text: str, value: str, gauge: Gauge, *, unit: str | None = None) -> Reply:
    """1 where an answer is the reference, else 0; the outcome is not "ok" where a formula took too long.

    Args:
        gold: the reference, folded; `text` and `value` also.
        text: the answer as it is written.
        value: what it names.
        unit: the unit of the reference, where its text has none.
    """
    want = reference_amount(gold, unit)
    if key(gold) in (key(text), key(value)) and key(gold) and not (gauge.units_required and want is not None):
        return Reply(OK, 1.0)
    if (outcome := too_much(text)) is not None:
        return Reply(outcome)
    if _LABELS.fullmatch(gold.strip(" $")):
        return Reply(OK, float(_labels(gold) in (_labels(text), _labels(value))))
    answer = _ROUGHLY_SAID.sub("", value.strip(), count=1)
    got = amount(answer)
    if want is not None and got is not None:
        return Reply(OK, float(await _same(want, got, gauge)))
    answer = CALL.sub("", answer.strip(" $"), count=1) if CALL.match(answer.strip(" $")) else answer
    if want is not None and _EQUALS.search(answer) and not RELATION.search(normalised(answer)):
        return await _chain(want, normalised(answer), gauge)
    return await _formula(gold, answer, gauge)


async def _chain(want: Amount, answer: str, gauge: Gauge) -> Reply:
    """`99 - 90 = 9 pages`: the last side is the answer, and every other side of plain numbers has to be equal to it."""
    sides, signs = _EQUALS.split(answer)[::2], _EQUALS.findall(answer)
    got = amount(sides[-1])
    if got is None or len(sides) > _MOST_SIDES:
        return Reply(OK, 0.0)
    plain = str(got.value / 100 if got.percent else got.value)
    found = Reply(OK, float(await _same(want, got, gauge)))
    for index, side in enumerate(sides[:-1]):
        if found.outcome != OK or not found.value:
            break
        exact = all(sign == "=" for sign in signs[index:])
        near = gauge if exact else replace(gauge, slack=max(gauge.slack, _ROUGHLY))
        part = amount(side)
        if part is not None:
            found = replace(found, value=float(await _same(want, part, near)))
        elif not re.search(r"[^\W\d_]", _COMMAND.sub("", side)):
            reply = await compared(plain, side, near.rules, near.graders, near.time_limit_s)
            found = replace(reply, queued=found.queued + reply.queued)
    return found


async def _same(want: Amount, got: Amount, gauge: Gauge) -> bool:
    if want.units and got.units and (want.units != got.units or want.rest or got.rest):
        await asyncio.to_thread(warm)
    return same(want, got, slack=gauge.slack, absolute=gauge.absolute, required=gauge.units_required)


async def _formula(gold: str, answer: str, gauge: Gauge) -> Reply:
    gold, answer = _plain(gold), _plain(answer)
    if has_cjk(gold) or has_cjk(answer):
        return Reply(OK, float(key(gold) == key(answer)))
    if key(gold) != key(answer) and key(gold).casefold() == key(answer).casefold():
        return Reply(OK, 0.0)  # a lone letter is no option here
    return await compared(gold, answer, gauge.rules, gauge.graders, gauge.time_limit_s)


def _plain(text: str) -> str:
    """The formula that a text is, Chinese joining words in English, `剩下的页数 = 9` without its name."""
    text = normalised(text)
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
    return {str(number_of(label) or label) for label in _ONE_LABEL.findall(text)}
