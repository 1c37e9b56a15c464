"""Compares a value with the reference: words, numbers with units, formulas."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rollmill_grading.collection import RELATION
from rollmill_grading.comparison import CALL_EQUATION, AnswerMatchOptions
from rollmill_grading.complexity import oversize_outcome
from rollmill_grading.errors import GradingError
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.normalization import CJK, comparison_key, has_cjk, parse_circled_digit
from rollmill_grading.numerals import (
    CHINESE_DIGITS,
    CHINESE_NUMERAL,
    MEASURE_WORDS,
    SCALE,
    SCALES,
    numeral_value,
    parse_chinese_numeral,
)
from rollmill_grading.quantities import Quantity, normalize_answer, parse_quantity, quantities_equal
from rollmill_grading.school.question import SchoolQuestion
from rollmill_grading.school.unit_words import UNIT_PATTERN, UnitPowers, convert_unit, load_pint, parse_units
from rollmill_grading.symbolic import compare_answers
from rollmill_grading.verdict import OK
from rollmill_grading.worker_process import GraderResult

# Numbers with units as pupils write them: `750千克`, `1.5万`, `2小时30分`, `三分之二`, `99-90=9（页）`.

_ARABIC = (
    r"(?<![\d.A-Za-z_^])(?:\d{0,30}\\frac ?(?:\{-?[\d.,]{1,30}\} ?\{-?[\d.,]{1,30}\}|\d\d)"
    r"|(?:\d{1,30}分之)?(?:\d{1,3}(?:,\d{3}){1,9}(?!\d)|\d{1,60})(?:\.\d{1,60})?"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10\^ ?\{?[+-]?\d{1,3}\}?|[eE][+-]?\d{1,3}|(?: \d{1,30})?/\d{1,30}(?:\.\d{1,30})?)?"
    r"|百分之\d{1,30}(?:\.\d{1,30})?|[一二三四五六七八九十百]{1,6}分之[零一二三四五六七八九十百]{1,6})"
)
_AMOUNT = (
    rf"(?P<sign>负|零下|(?<![\w)}}\]])[+-] ?)?(?:(?P<money>[¥$€£]) ?)?(?P<number>{{number}})"
    rf"(?: ?(?P<times>{SCALE}))?"
    rf"(?: ?(?P<percent>\\?%|(?i:per ?cent)(?![A-Za-z])))?"
    rf"(?: ?\(? ?(?P<unit>{UNIT_PATTERN}) ?\)?)?"
)
_FOUND = re.compile(_AMOUNT.replace("{number}", _ARABIC))
_WHOLE = re.compile(_AMOUNT.replace("{number}", CHINESE_NUMERAL))
_LINK = re.compile(r" ?(?:又|零|and|,)? ?")
_COUNTER = re.compile(rf" ?\(?(?P<word>[{CJK}]{{1,5}}|[A-Za-z]{{2,20}}(?: [A-Za-z]{{2,20}})?)?\)? ?[.。!]?")
_NO_COUNTER = re.compile(
    r"\b(?:or|and|to|maybe|perhaps|not|about|between|is|wrong|incorrect)\b|[或和与到至不非错以]", re.IGNORECASE
)
_WRAPPED = re.compile(r"\\(?:text|mathrm|rm|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number and the candidates for its unit: several if a word has several meanings, none without a unit.

    `rest` are further parts, `30 minutes` of `2 hours 30 minutes`. `word` is a counted thing: `页`, `apples`.
    """

    value: Fraction
    percent: bool = False
    units: tuple[UnitPowers, ...] = ()
    rest: tuple[Amount, ...] = ()
    word: str = ""

    def within(self, unit: UnitPowers) -> Fraction | None:
        """Return the value in `unit`; None if it measures something else, or its parts do not get smaller."""
        total, last = Fraction(0), None
        for part in (self, *self.rest):
            sizes = [size for each in part.units if (size := convert_unit(Fraction(1), each, unit)) is not None]
            if not sizes or (last is not None and sizes[0] >= last):
                return None
            last = sizes[0]
            values = [convert_unit(part.value, each, unit) for each in part.units]
            value = next(each for each in values if each is not None)
            total += value
        return total


def parse_amount(text: str) -> Amount | None:
    """Parse a folded text as an amount, in digits or Chinese numerals; a counting word may follow."""
    text = _flat(text)
    if len(text) > 400:
        return None
    parts: list[Amount] = []
    at = 0
    while (found := _FOUND.match(text, at) or (_WHOLE.match(text) if not at else None)) is not None:
        part = _amount(found)
        if part is None:
            return None
        parts.append(part)
        at = found.end()
        if not part.units:
            break
        link = _LINK.match(text, at)
        at = link.end() if link and _FOUND.match(text, link.end()) else at
    behind = _COUNTER.fullmatch(text, at)
    if not parts or behind is None or _NO_COUNTER.search(behind[0]):
        return None
    if any(not part.units for part in parts[1:]) or (len(parts) > 1 and behind["word"]):
        return None
    first, word = parts[0], behind["word"] or ""
    if text[0] in CHINESE_DIGITS and word and word[0] not in MEASURE_WORDS:
        return None
    word = first.word or ("" if first.units else unit_word(word))
    return Amount(first.value, first.percent, first.units, tuple(parts[1:]), word)


def _flat(text: str) -> str:
    """Normalise the text, and unwrap units in `\\mathrm{m/s^{2}}`."""
    return normalize_answer(_WRAPPED.sub(r" \1 ", text))


def amounts_equal(gold: Amount, answer: Amount, *, slack: Fraction, absolute: Fraction, required: bool) -> bool:
    """True if two amounts are equal.

    A missing unit is accepted unless it is required; a unit that measures something else is not. Imports pint if both
    have a unit and they differ. Raises MissingPintError without it.
    """
    value = answer.value
    if gold.units and gold.units == answer.units and not (gold.rest or answer.rest):
        return _near(gold.value, value, slack, absolute)
    if gold.units and answer.units:
        values = [(want, got) for unit in gold.units for want, got in [(gold.within(unit), answer.within(unit))]]
        return any(w is not None and g is not None and _near(w, g, slack, absolute) for w, g in values)
    if (gold.units and (answer.word or required)) or answer.rest or gold.rest:
        return False
    if gold.word and (answer.units or (answer.word != gold.word and (answer.word or required))):
        return False
    if _near(gold.value, value, slack, absolute) and gold.percent == answer.percent:
        return True
    one, other = Quantity(gold.value, percent=gold.percent), Quantity(value, percent=answer.percent)
    return quantities_equal(one, other, slack=slack, units_required=required)


def _near(gold: Fraction, answer: Fraction, slack: Fraction, absolute: Fraction) -> bool:
    return abs(gold - answer) <= max(slack * abs(gold), absolute)


def _amount(found: re.Match[str]) -> Amount | None:
    value = _value(found["number"])
    if value is None:
        return None
    value *= SCALES[found["times"].lower()] if found["times"] else 1
    if found["sign"] and found["sign"].strip() != "+":
        value = -value
    percent = bool(found["percent"]) or found["number"].startswith("百分之")
    unit = parse_units(found["unit"]) if found["unit"] else ()
    if not unit and found["money"]:
        unit = parse_units(found["money"])
    return Amount(value, percent, unit, (), "" if unit else unit_word(found["unit"]))


def unit_word(unit: str | None) -> str:
    """Normalise a counted thing, `Apples` to `apple`."""
    return (unit or "").lower().removesuffix("s")


def _value(number: str) -> Fraction | None:
    bottom, over, top = number.partition("分之")
    if over and not set(number) <= set(CHINESE_DIGITS) | set("分之点"):
        parts = [Fraction(100) if part == "百" else _value(part) for part in (bottom, top)]
        if parts[0] is None or parts[1] is None or parts[0] == 0:
            return None
        return parts[1] if bottom == "百" else parts[1] / parts[0]
    if over:
        found = numeral_value(number)
        return found * 100 if found is not None and bottom == "百" else found
    if number[0] in CHINESE_DIGITS:
        return parse_chinese_numeral(number)
    plain = parse_quantity(number.replace(" ", "") if "frac" in number else number)
    return None if plain is None else plain.value


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
    """Rules for comparing values. `time_limit_s` applies to each formula."""

    graders: GraderPool
    time_limit_s: float
    slack: Fraction = Fraction(0)
    absolute: Fraction = Fraction(0)
    units_required: bool = False

    @property
    def rules(self) -> AnswerMatchOptions:
        return AnswerMatchOptions(self.slack, units_required=self.units_required)


def _reference_amount(gold: str, question: SchoolQuestion) -> Amount | None:
    """Parse a reference as an amount in the question's unit. Raises GradingError if it has a different unit itself."""
    found, unit = parse_amount(gold), question.unit
    if found is None or unit is None:
        return found
    known = parse_units(unit)
    if found.units and not set(found.units) & set(known):
        name = f"{question.key_prefix}unit"
        raise GradingError(f"its answer is {gold!r:.80}, but `{name}` is {unit}; leave out one of the two units")
    return replace(found, units=known, word="" if known else unit_word(unit))


async def compare_value(
    gold: str, text: str, value: str, question: SchoolQuestion, options: ValueMatchOptions
) -> GraderResult:
    """Return 1 if an answer equals the reference, else 0; the outcome is not "ok" if a formula took too long.

    Args:
        gold: the reference; all texts are folded.
        text: the answer as it is written.
        value: the value in it.
        question: has the unit of the reference, if its text has none.
    """
    gold_amount = _reference_amount(gold, question)
    if (
        comparison_key(gold) in (comparison_key(text), comparison_key(value))
        and comparison_key(gold)
        and not (options.units_required and gold_amount is not None)
    ):
        return GraderResult(OK, 1.0)
    if (outcome := oversize_outcome(text)) is not None:
        return GraderResult(outcome)
    if _LABELS.fullmatch(gold.strip(" $")):
        return GraderResult(OK, float(_labels(gold) in (_labels(text), _labels(value))))
    answer = _ROUGHLY_SAID.sub("", value.strip(), count=1)
    answer_amount = parse_amount(answer)
    if gold_amount is not None and answer_amount is not None:
        return GraderResult(OK, float(await _same(gold_amount, answer_amount, options)))
    answer = CALL_EQUATION.sub("", answer.strip(" $"), count=1) if CALL_EQUATION.match(answer.strip(" $")) else answer
    if gold_amount is not None and _EQUALS.search(answer) and not RELATION.search(normalize_answer(answer)):
        return await _chain(gold_amount, normalize_answer(answer), options)
    return await _formula(gold, answer, options)


async def _chain(gold_amount: Amount, answer: str, options: ValueMatchOptions) -> GraderResult:
    """Compare `99 - 90 = 9 pages`: the last side is the answer, and every other side of plain numbers must equal it."""
    sides, signs = _EQUALS.split(answer)[::2], _EQUALS.findall(answer)
    answer_amount = parse_amount(sides[-1])
    if answer_amount is None or len(sides) > _MOST_SIDES:
        return GraderResult(OK, 0.0)
    plain = str(answer_amount.value / 100 if answer_amount.percent else answer_amount.value)
    found = GraderResult(OK, float(await _same(gold_amount, answer_amount, options)))
    for index, side in enumerate(sides[:-1]):
        if found.outcome != OK or not found.value:
            break
        exact = all(sign == "=" for sign in signs[index:])
        near = options if exact else replace(options, slack=max(options.slack, _ROUGHLY))
        part = parse_amount(side)
        if part is not None:
            found = replace(found, value=float(await _same(gold_amount, part, near)))
        elif not re.search(r"[^\W\d_]", _COMMAND.sub("", side)):
            reply = await compare_answers(plain, side, near.rules, near.graders, near.time_limit_s)
            found = replace(reply, queue_s=found.queue_s + reply.queue_s)
    return found


async def _same(gold_amount: Amount, answer_amount: Amount, options: ValueMatchOptions) -> bool:
    if (
        gold_amount.units
        and answer_amount.units
        and (gold_amount.units != answer_amount.units or gold_amount.rest or answer_amount.rest)
    ):
        await asyncio.to_thread(load_pint)
    return amounts_equal(
        gold_amount, answer_amount, slack=options.slack, absolute=options.absolute, required=options.units_required
    )


async def _formula(gold: str, answer: str, options: ValueMatchOptions) -> GraderResult:
    gold, answer = _plain(gold), _plain(answer)
    if has_cjk(gold) or has_cjk(answer):
        return GraderResult(OK, float(comparison_key(gold) == comparison_key(answer)))
    if (
        comparison_key(gold) != comparison_key(answer)
        and comparison_key(gold).casefold() == comparison_key(answer).casefold()
    ):
        return GraderResult(OK, 0.0)  # a lone letter is not an option here
    return await compare_answers(gold, answer, options.rules, options.graders, options.time_limit_s)


def _plain(text: str) -> str:
    """Return the formula of a text: Chinese conjunctions in English, `剩下的页数 = 9` without its name."""
    text = normalize_answer(text)
    text = _BEHIND.sub("", text)
    name = _NAME.match(text)
    if name is not None and has_cjk(name[0]):
        text = text[name.end() :].lstrip("=≈ ")
    for word, sign in _IN_WORDS.items():
        text = text.replace(word, sign)
    return text


def _labels(text: str) -> set[str] | None:
    """Return the numbered statements in `①③④` or `(1), (3), (4)`; None for anything else."""
    text = text.strip(" $.。")
    if not _LABELS.fullmatch(text):
        return None
    return {str(parse_circled_digit(label) or label) for label in _ONE_LABEL.findall(text)}
