"""Detects values of a sentence that are only times, places or parts of another value, not answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rollmill_grading.normalization import CJK
from rollmill_grading.numerals import find_english_numbers
from rollmill_grading.quantities import normalize_answer, parse_quantity
from rollmill_grading.values import ValueSpan, find_values

_PREPOSITION = re.compile(
    r"(?:\b(?:in|on|at|when|for|if|where|with|after|from|by|than|per|during|within|between|until|since|over|near|beside|behind|around|modulo|mod"
    r"|given|into|every|each|out of|instead of|unlike|not(?: (?:just|only|merely))?(?: the)?|of the|because|as"
    r"|assuming|divided|multiplied|times|using|nearest"
    r"|except|excluding|without|(?<=[\d)$] )minus|plus|to|other|another|first|last|next|previous|initial|original|all"
    r"|these|those|both)|除以|乘以|比[^,，。]{0,12}|的第|在|当|若|如果|比|从|每|把|将|向|(?<=[A-Za-z])n't|不是|不为|不等于)"
    r"\s*(?:the|a|an|his|her|their|its|my|our|your|x\s*=|[a-z]\s*=|year|years|day|days)?\s*$",
    re.IGNORECASE,
)
_RESULTING = re.compile(
    r"(?:\b(?:left|leav\w+|ends? up|ended up|start over|find|remain\w*)(?: \w+)? with|\b(?:com\w+(?: out)?"
    r"|amounts?|adds? up|equals?|equal|simplif\w+"
    r"|reduc\w+|evaluat\w+|round\w*|converg\w+|work\w* out|boil\w* down|sums?|totals?|corresponds?"
    r"|equates?) to|\b(?:arriv\w+|st(?:an|oo)ds?|stands?|peak\w*|valued|s[ia]ts?|is|was|ends?|ended|starts?|started"
    r"|begins?|began|opens?|closes?|finish\w*|leaves?|lands?|gets? (?:to |home )?(?:\w+ )?) ?at|\bresult\w* in"
    r"|\b(?:ris\w+|rose|f[ae]ll\w*|gr[eo]w\w*|dropp?\w*|(?:in|de)creas\w+|reduc\w+|chang\w+|declin\w+|went (?:up|down)"
    r"|goes (?:up|down)) by)\s*$",
    re.IGNORECASE,
)
_DETAIL = re.compile(
    r"\b(?:of|for|to|in|on|at|from|with|over|per|than|because|since|when|if|as|while|by|and)\b[^,.;=]{0,30}$",
    re.IGNORECASE,
)
_PLACE = re.compile(
    r"(?:\b(?:attained|achieved|reached|obtained|assumed|taken|occurs?|occurring|happens|holds|at|when|whenever|where|if"
    r"|for|only|with)|当且仅当|此时|当|在)\s*,?\s*(?:the point |point )?[$(\\]*$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"[\s$(\\]*[A-Za-z](?:_\{?\w+\}?)?\s*=[^=]+|[\s$\\(]*[A-Za-z]\s*=\s*[A-Za-z]\s*=[^=]+")
_HAS_NAME = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])|=")
_APPROXIMATELY = re.compile(
    r"[\s$,(（]*(?:or|which is|that is|i\.e\.,?|也就是|即)?\s*(?:about|approximately|approx\.?|roughly|around|nearly"
    r"|≈|~|\\approx|大?约(?:为|是|等于)?)\s*[$¥(\\]*",
    re.IGNORECASE,
)
_EXACT = re.compile(r"\\(?:sqrt|[dt]?frac|pi|ln|log|sin|cos|tan)|[√π/^]|(?<![A-Za-z])(?:e|pi|sqrt)(?![A-Za-z])")
_EACH = re.compile(r"[,，;；]\s*(?:each|every)\b[^,.;]{0,20}$", re.IGNORECASE)
_EACH_IN_CHINESE = re.compile(rf"[,，;；]\s*每[{CJK}]{{1,4}}$")
_CONDITION = re.compile(
    r"\b(?:if|assuming|provided|given)(?: that)? (?:each|every|one|an?|the)\b[^,.;=]{0,30}$", re.IGNORECASE
)
_POSSIBLE = re.compile(rf"(?:可以|可|能|最多|至多|分得|分到|每[{CJK}]{{1,3}}分)[{CJK}]{{0,4}}$")
_REMAINDER = re.compile(rf"[{CJK}]?[,，;；](?:还|并|会|并且)?(?:剩余?|余|多)(?:下|出)?$")
_SHARE = re.compile(rf"[{CJK}]{{0,6}}[,，;；](?:大?约|正好|恰好)?占[{CJK}]{{0,8}}$")
_TOTAL = re.compile(r"(?:共|总)[^,，。;；]{0,6}$")
_WHO = re.compile(r",\s*who(?:se)?\b[^,.;]{0,30}$", re.IGNORECASE)
OF_THEM = re.compile(r"\s*(?:of|out of|from) (?:them|these|those|which|whom)\b", re.IGNORECASE)
"""Words that make a value a part of an earlier one."""
_PARTS_BEGIN = re.compile(
    r"[^,:;(（，：；=]*[,:;(（，：；]\s*(?:(?:with|including|namely|i\.e\.|of which) )?(?:the )?[$\s]*"
    rf"(?P<chinese>(?:(?![用吃卖花送走去剩借给付减余])[{CJK}]){{0,6}})",
    re.IGNORECASE,
)
_LEFT = re.compile(r"\b(?:left|remain\w*|so|thus|hence|therefore)\b|剩|余|所以|因此|=", re.IGNORECASE)
_CONCLUDING = re.compile(r"[\s*#>]*(?:so|thus|hence|therefore|consequently|所以|因此|故|答)(?![a-z])", re.IGNORECASE)
_LONGEST_GAP = 60
_MOST = 12
"""Maximum number of values of a sentence, and of parts of a value, that are checked."""


def drop_details(text: str, groups: list[ValueSpan], *, said: bool) -> list[ValueSpan]:
    """Drop the values that only explain an earlier one: `150 km: 90 km by car and 60 by bus`.

    Args:
        said: the text follows a marker such as "the answer is".
    """
    kept: list[ValueSpan] = []
    main: ValueSpan | None = None
    if len(groups) > _MOST:
        return groups
    for group in groups:
        if main is not None:
            if kept[-1] is main and _are_parts(text, main, groups):
                break
            if _is_detail(text, main, kept[-1], group, said=said):
                continue
        kept.append(group)
        if not is_qualifier(text, group):
            main = group
    return kept


def _is_detail(text: str, main: ValueSpan, before: ValueSpan, group: ValueSpan, *, said: bool) -> bool:
    between = text[before.unit_end : group.start]
    if len(between) > _LONGEST_GAP:
        return OF_THEM.match(text, group.unit_end) is not None
    written, behind = text[group.start : group.end], text[group.unit_end : group.unit_end + 1]
    if OF_THEM.match(text, group.unit_end) or _WHO.search(between) or _EACH.search(between):
        return True
    if said and _EACH_IN_CHINESE.search(between):
        return True
    if before is main and (
        _CONDITION.search(between) or _is_remainder(text, main, between) or _is_share(text, main, between)
    ):
        return True
    exact = text[main.start : main.end]
    if _NAMED.fullmatch(written) and _PLACE.search(between):
        return _HAS_NAME.search(re.sub(r"\\[A-Za-z]+", "", exact)) is None
    if _APPROXIMATELY.fullmatch(text, before.unit_end, group.start):
        return before is main and _EXACT.search(exact) is not None
    in_brackets = between.strip(" $") in ("(", "（") and behind in (")", "）")
    return in_brackets and main.unit_end > main.end and group.unit_end > group.end and before is main


def _is_remainder(text: str, main: ValueSpan, between: str) -> bool:
    """True if a value is what a division leaves, as in `可以装4箱，还剩2个`; `吃了4个，还剩2个` is a subtraction."""
    return _REMAINDER.fullmatch(between) is not None and _POSSIBLE.search(text[: main.start]) is not None


def _is_share(text: str, main: ValueSpan, between: str) -> bool:
    """True if a value is the share that a total makes up, as in `一共有12名女生，占全班的40%`."""
    return _SHARE.fullmatch(between) is not None and _TOTAL.search(text[: main.start]) is not None


def _are_parts(text: str, whole: ValueSpan, groups: Sequence[ValueSpan]) -> bool:
    """True if the values after one add up to it, as in `five cats, two on the sofa and three here`."""
    begin = _PARTS_BEGIN.match(text, whole.unit_end)
    last = groups[-1].unit_end
    if begin is None or _LEFT.search(text, whole.unit_end):
        return False
    behind = find_values(text[whole.unit_end : last])
    if not 2 <= len(behind) <= _MOST or whole.unit_end + behind[0].start > begin.end():
        return False
    total = _number(text, whole)
    if re.match("[A-Za-z]", text[whole.start :]):
        return total is not None and sum(find_english_numbers(text[whole.unit_end : last])) == total
    parts = [_number(text[whole.unit_end :], each) for each in behind]
    return total is not None and None not in parts and sum(part for part in parts if part is not None) == total


def _number(text: str, value: ValueSpan) -> Fraction | None:
    found = parse_quantity(normalize_answer(text[value.start : value.end]))
    return None if found is None else found.value


def is_qualifier(text: str, group: ValueSpan) -> bool:
    """True if a value is only a time or a place, as in "in 2019" or "for n = 4"."""
    before = max(0, group.start - 40)
    if "=" in text[group.start : group.end]:
        return False
    if _RESULTING.search(text, before, group.start) or text.startswith(("$$", "\\["), group.start):
        return False
    if text.startswith((" other ", "其他"), group.end):
        return True
    return _PREPOSITION.search(text, before, group.start) is not None


def ends_in_value(text: str, groups: Sequence[ValueSpan]) -> bool:
    """True if a sentence draws a conclusion and ends in its last value, as in `So he gets home at 8:15`."""
    return bool(groups) and _CONCLUDING.match(text) is not None and not text[groups[-1].unit_end :].strip(" .*。!$)")


def computed_value(text: str, groups: Sequence[ValueSpan]) -> ValueSpan | None:
    """Return the last computed value, as in `50 / 10 = 5 days to use 50 liters`, if only details follow it."""
    for group in reversed(groups):
        if "=" in text[group.start : group.end]:
            return group
        if not _DETAIL.search(text, max(0, group.start - 40), group.start):
            return None
    return None
