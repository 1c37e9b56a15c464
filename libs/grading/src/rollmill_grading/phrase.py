"""Extracts the value of a phrase or a sentence: `so there are $12$ apples, because ...` gives `12 apples`.

Never raises.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollmill_grading.normalization import CJK
from rollmill_grading.numerals import (
    CHINESE_NUMERAL,
    ENGLISH_NUMERAL,
    parse_chinese_numeral,
    parse_english_number,
)
from rollmill_grading.qualifiers import OF_THEM, computed_value, drop_details, ends_in_value, is_qualifier
from rollmill_grading.values import ValueSpan, find_values

MAX_PHRASE_CHARS = 2000

_JOINER = re.compile(
    r"\s*\(?(?:[,;、，；]?\s*(?:and|or|and/or|以及|和|与|或者?|还是|及|且|到|至|~|–)(?![A-Za-z])|[,;、，；]|\bto\b|\\quad|&)\s*"
    r"(?:also |even |maybe |perhaps |possibly |either |是 ?|为 ?)?",
    re.IGNORECASE,
)
_DRAWS = re.compile(
    r"=|\b(?:so|thus|hence|therefore|total\w*|altogether|leav\w+|which (?:is|makes|gives)|number|counts?|counted)\b"
    r"|所以|因此|故|共|数量|个数|一起|总",
    re.IGNORECASE,
)
_TRAILING = re.compile(
    r"[,，;；:]?\s*(?:\b(?:because|since|so that|so|which|where|when|whenever|if|as|given|after|with|while|but"
    r"|although|though"
    r"|assuming|provided|after|making|meaning|giving|leaving|obtained|using|by|due|for)\b|因为|由于|所以|也就是|其中|即可)"
    r"|\s[-–—]+\s|—",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"\b(?:because|since|due to|of which|of whom|where|as (?:he|she|it|they|we|there|each|the|this|that"
    r"|calculated|shown))\b|因为|由于|其中",
    re.IGNORECASE,
)
_ALSO = re.compile(
    r"(?<=\S)\s*(?<!\\)\((?:[\s$]*(?:≈|~|\\approx|about\b|approximately\b|approx\b|roughly\b|大?约)[^()\n]{1,60}"
    r"|(?<=\d °[CF] \()-?[\d.,]+ ?°[CF]|(?<=\d°[CF] \()-?[\d.,]+ ?°[CF])\)",
    re.IGNORECASE,
)
"""The same value in another form: `36π (≈ 113.1)`, `100 °C (212 °F)`."""
_RESTATED = re.compile(
    rf"(?:(?P<words>{ENGLISH_NUMERAL}) |(?P<chinese>{CHINESE_NUMERAL}) ?)\((?P<number>\d[\d,]*(?:\.\d+)?)\)",
    re.IGNORECASE,
)
"""A number in words and again in digits: `five (5)`."""
_ASIDE = re.compile(
    r"(?<!\\)\s*[(（](?=[^()（）]*(?:[A-Za-z]{3,}|[\u4e00-\u9fff]{2,}|[A-Za-z]{1,2}\s*=))([^()（）\\$]{1,300})[)）]"
)
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:more|less|greater|fewer|larger|smaller|higher|lower|bigger) than|\b(?:at least|at most|over"
    r"|under|above|below|up to"
    r"|no more than|no less than|almost|nearly|between|from)|大于"
    r"|小于|超过|不到|至少|至多|不少于|不超过|不足|多于|少于|高于|低于|介于|±)"
    r"\s*(?:or equal to\s*)?$",
    re.IGNORECASE,
)
_DELIMITERS = re.compile(
    r"\$\$?|\\[\[\]()]|\\(?:begin|end)\{(?:aligned|align|gathered|gather|equation|split|eqnarray)\*?\}"
    r"|\\therefore(?![A-Za-z])"
)
_SIDES = re.compile(r"=|\\(?:simeq|approx|sim|equiv|[Rr]ightarrow|Longrightarrow|implies|to)(?![A-Za-z])|≈")
_WHOLE = re.compile(
    r"\\begin|\\(?:text|mathrm|quad)\s*\{? ?(?:or|and)\b|[<>]|\\(?:le|ge|lt|gt|leq|geq|neq)(?![a-z])"
    r"|[,，](?:[\s$]|\\q?quad|\\[,;: ])*[A-Za-z]\w*(?:\([^()]{1,20}\))? ?=|\b(?:or|and)\b"
)
_NAMES = re.compile(
    r"(?<!\\)(?<![A-Za-z])(?!(?:cdot|times|frac)(?![a-z]))[A-Za-z]"
    r"|\\(?:theta|lambda|omega|mu|sigma|alpha|beta|phi|pi|nu|tau|Delta)"
)
_CUT_SIDE = re.compile(r"(?:[-+*/×÷)−–]|\d\s*[xX]|\b(?:times|plus|minus|by|of|and))\s*\$?\s*$")
_MONTH = re.compile(
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|March|April|May|June|July|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?"
    r"|Dec(?:ember)?)\.? $"
)
_NEGATIVE = re.compile(r"(?:负|零下|(?<![\d)$] )\b(?:negative|minus) )$", re.IGNORECASE)
_BOUND_BEHIND = re.compile(
    rf"\s*[{CJK}]?\s*(?:以上|以下|以内|左右|之间|多(?=[{CJK}]))|\s*(?:[a-z]+\s+)?or (?:more|less|fewer|greater|higher"
    rf"|lower|above|below|so)\b|\+(?!\d)",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:\s|[:*_>#\"“”'‘’]|-\s|(?:(?:therefore|thus|hence|so|then|just|simply|exactly|approximately|about|roughly|nearly|around"
    r"|clearly|indeed|now|actually|really|probably|likely|also|only|always|given by|equal to|equals"
    r"|found to be|that|both|either"
    r"|option|choice|approx|negative|minus)\b|大约|约|是|为|等于|共|有|就|应|该)[ ,:]*)*",
    re.IGNORECASE,
)


_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|mbox)\s*\{([^{}]*)\}")


def strip_markup(text: str) -> str:
    """Strip bold marks, quotes, code marks and punctuation around a phrase."""
    wrapped = _WRAPPED.fullmatch(text.strip(" \t\n*$.").removeprefix("\\(").removesuffix("\\)").strip())
    text = wrapped[1] if wrapped is not None else text
    text = re.sub(r"\*\*|__(?=\S)|(?<=\S)__", "", text).strip().strip("`").strip(" \t\n*:,，;；。")
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def drop_parentheticals(text: str) -> str:
    """Remove remarks in parentheses: `5 cats (2 black, 3 white)`, `five (5)`, `9π (≈ 28.3)`. Alternatives stay."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if re.match(r"\s*(?:or|and|maybe|perhaps|或)\b", found[1], re.IGNORECASE) else " "

    return _ASIDE.sub(kept, _RESTATED.sub(_restated, _ALSO.sub(" ", text))) if "(" in text else text


def _restated(found: re.Match[str]) -> str:
    words, number = found["words"] or found["chinese"], found["number"]
    value = parse_english_number(words) if found["words"] else parse_chinese_numeral(words)
    return number if value == Fraction(number.replace(",", "")) else found[0]


def extract_value(phrase: str, *, leads: bool) -> str:
    """Return the value of a phrase, with its unit; the phrase itself, stripped, if it has none.

    Several values joined by "or", "and" or commas are one. Of several others, the last counts that is not a qualifier
    such as "in 2019".

    Args:
        leads: the phrase follows a marker such as "the answer is", so a value at its beginning is the answer.
    """
    text = strip_markup(drop_parentheticals(phrase[:MAX_PHRASE_CHARS]))
    groups = _groups(text, find_values(text))
    if not groups:
        return _without_reason(text)
    groups = _main(text, groups, leads=leads)
    lead = _LEAD.match(text)
    is_subject = (
        len(groups) > 1 and re.match(f"[{CJK}]", text[groups[0].unit_end :]) is not None
    )  # `1吨稻谷可碾米750千克`
    if leads and lead is not None and groups[0].start <= lead.end() + 1 and not is_subject:
        return _written(text, groups[0])
    chosen = next((group for group in reversed(groups) if not is_qualifier(text, group)), groups[-1])
    if not leads and (result := computed_value(text, groups)) is not None:
        chosen = result
    written = _written(text, chosen)
    return written if leads else last_equation_side(written)


def _main(text: str, groups: list[ValueSpan], *, leads: bool) -> list[ValueSpan]:
    """Return the values before any reason, without those that only explain an earlier one."""
    reason = _REASON.search(text, groups[0].end)
    if reason is not None and "=" not in text[reason.end() :]:
        groups = [group for group in groups if group.start < reason.start()]
    return drop_details(text, groups, said=leads)


def last_equation_side(formula: str) -> str:
    r"""Return the last side of a worked chain with names in it, as in `s = f \theta = 50`; other formulas unchanged.

    A chain of plain numbers stays whole, because every side of it must be right.
    """
    inner = _DELIMITERS.sub(" ", formula).replace("&", " ")
    rows = [row.strip() for row in inner.split("\\\\") if row.strip()]
    sides = [side.strip(" .,;") for side in _SIDES.split(rows[-1] if rows else "")]
    is_chain = len(rows) > 1 or len(sides) > 2 or "arrow" in inner
    if not is_chain or _WHOLE.search(inner) or not sides[-1] or not _NAMES.search(" ".join([*rows[:-1], *sides[:-1]])):
        return formula
    return sides[-1]


def has_conclusion(sentence: str) -> bool:
    """True if a sentence has a value that is not just a time or place."""
    text = strip_markup(drop_parentheticals(sentence[:MAX_PHRASE_CHARS]))
    groups = _groups(text, find_values(text))
    return any(not is_qualifier(text, group) for group in groups) or ends_in_value(text, groups)


def _written(text: str, group: ValueSpan) -> str:
    """Return the group as it is written, including words that make it a bound, as in `less than 9` and `9页以上`."""
    before = _BOUND_BEFORE.search(text, max(0, group.start - 40), group.start)
    behind = _BOUND_BEHIND.match(text, group.end) or _BOUND_BEHIND.match(text, group.unit_end)
    negative = _NEGATIVE.search(text, 0, group.start)
    month = _MONTH.search(text, max(0, group.start - 12), group.start)
    lead = before or negative or month
    start = lead.start() if lead is not None else group.start
    written = text[start : behind.end() if behind else group.unit_end].strip().strip("_")
    if "=" in written and _CUT_SIDE.search(text, max(0, group.start - 20), group.start):
        written = written.rpartition("=")[
            2
        ].strip()  # in `72 cubic feet * 3/4 = 54 cubic feet` the left side is not a formula
    return written.replace(" (or ", " or ") if written.count("(") > written.count(")") else written


def names_several_values(sentence: str) -> bool:
    """True if a sentence has values of different things without a conclusion, as in `3 boats and 4 people`."""
    text = strip_markup(drop_parentheticals(sentence[:MAX_PHRASE_CHARS]))
    groups = _groups(text, find_values(text))
    if not groups or _DRAWS.search(text):
        return False
    main = [each for each in _main(text, groups, leads=False) if not is_qualifier(text, each)]
    return len({text[each.start : each.unit_end] for each in main}) > 1


def has_value(text: str) -> bool:
    """True if it has a number or a formula."""
    return bool(find_values(text[:MAX_PHRASE_CHARS]))


def _without_reason(text: str) -> str:
    found = _TRAILING.search(text, 1)
    return strip_markup(text[: found.start()]) if found is not None and text[: found.start()].strip() else text


def _groups(text: str, found: list[ValueSpan]) -> list[ValueSpan]:
    """Merge values of one list, as in `x = 2 or x = 3`."""
    groups: list[ValueSpan] = []
    for value in found:
        between = text[groups[-1].unit_end : value.start] if groups else ""
        unit = text[groups[-1].end : groups[-1].unit_end].strip() if groups else ""
        continues = unit != "" and " " not in unit and value.unit_end > value.end and between in ("", " ", "又", "零")
        is_part = OF_THEM.match(text, value.unit_end) is not None
        if (
            groups
            and not is_part
            and (continues or _JOINER.fullmatch(between) or _JOINER.fullmatch(text[groups[-1].end : value.start]))
        ):
            groups[-1] = ValueSpan(groups[-1].start, value.end, value.unit_end)
        else:
            groups.append(value)
    return groups


# Reads a plain statement as an answer if nothing marks one: `The process is called **mitosis**.` gives mitosis.

_LONGEST = 600
_BOLD = re.compile(r"\*\*([^*\n]{1,80}?)\*\*")
_YES = re.compile(r"[\s*]*(yes|no)\b[*]*(?=[,.;:!]|\s*$)", re.IGNORECASE)
_BETWEEN = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n")
_PREDICATE = re.compile(
    r"[^,;:]{0,200}?\b(?:is|are|was|were|will be)\b(?: (?:called|named|known as|actually|therefore|clearly))?\s+"
    r"(?P<said>[^,;:.!?]{1,80})"
)
_SUPERLATIVE = re.compile(
    r"\W*(?P<said>[^\s,;:.!?*][^,;:.!?*]{0,60}?)(?<!that)(?<!which)(?<!who)"
    r" (?:has|had|have|shows?|showed|reache[sd]|covers|makes up|received|recorded)"
    r" (?:by far )?the (?:[a-z]+ ?-?)?(?:most|least|fewest|[a-z]{2,}est)\b"
)
"""A subject that is picked out: `Brazil has the tallest bar`."""
_REASONED = re.compile(r"\W*(?P<said>[^,;:.!?\n]{1,40}), (?:because|since|as it|due to|judging by)\b", re.IGNORECASE)
_IN_CHINESE = re.compile(r"[^是，,。;；]{1,80}(?:应该)?(?<![不还就])是(?P<said>[^是，,。；;.]{1,30})[。.\s]*")
_CUT = re.compile(
    r"\s+(?:and|but|because|since|which|who|while|with|where|as|in the (?:image|picture|photo|chart|graph))\b.*",
    re.DOTALL | re.IGNORECASE,
)
_DOING = re.compile(r"[a-z]+ing (?:(?:an?|the) )?(?P<what>[a-z]+)", re.IGNORECASE)
_UNSURE = re.compile(
    r"\b(?:not|never|neither|nor|no|or|if|maybe|perhaps|probably|might|may|could|would|either|wrong|incorrect|wait"
    r"|actually|instead|but|however|is|are|was|were)\b|n't\b|[不非没错或否若]|可能|也许|如果|但",
    re.IGNORECASE,
)
_DOUBTED = re.compile(r"\b(?:or|but|maybe|perhaps|might|could|may|wait|actually|also|possibly)\b", re.IGNORECASE)
_TURNED = re.compile(r"\b(?:yes|wait|actually|but|however|sorry|correct\w*)\b", re.IGNORECASE)
_REFERS_BACK = re.compile(r"\s*(?:it|its|he|she|they|this|these|that)\b|\s*[它他她这其]", re.IGNORECASE)
_CONCLUDES = re.compile(r"\s*(?:so|thus|hence|therefore|所以|因此|故)\b", re.IGNORECASE)


def extract_statements(text: str) -> list[str]:
    """Return the readings of a short text without a marked answer: of `The car is red` "red".

    They are a leading yes or no, else the bold words, else the words before ", because", the subject of "has the
    tallest bar", or the predicate of the only sentence; of the first one where the others only say more about it ("It
    is a dog. It is brown."). A sentence that denies, doubts or offers several gives none.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST or text.endswith(("?", "？")):
        return []
    leading = _YES.match(text)
    if leading is not None:
        return [] if _TURNED.search(text, leading.end()) else [leading[1]]
    sentences = [each.strip() for each in _BETWEEN.split(text) if each.strip(" *")]
    if not sentences:
        return []
    if "**" in text:
        return _bold(sentences[-1])
    rest = sentences[1:]
    if rest and not all(_REFERS_BACK.match(each) for each in rest):
        if not _CONCLUDES.match(sentences[-1]):
            return []
        return _predicate(sentences[-1])
    return _predicate(sentences[0])


def _bold(sentence: str) -> list[str]:
    """Return the only bold words of the last sentence, unless it denies them or names others."""
    found = list(_BOLD.finditer(sentence))
    if len(found) != 1 or found[0][1].rstrip().endswith(":"):
        return []
    others = sentence[: found[0].start()] + sentence[found[0].end() :]
    plain = re.sub(r"\b(?:is|are|was|were)\b", "", others)
    return [] if _UNSURE.search(plain) else [strip_markup(found[0][1])]


def _predicate(sentence: str) -> list[str]:
    """Return the predicate of a sentence, with and without its verb: `playing tennis` and `tennis`."""
    leading = _REASONED.match(sentence) or _SUPERLATIVE.match(sentence)
    if leading is not None and not _UNSURE.search(leading["said"]):
        return [] if _DOUBTED.search(sentence, leading.end()) else [strip_markup(leading["said"])]
    found = _PREDICATE.match(sentence) or _IN_CHINESE.fullmatch(sentence)
    if found is None:
        return []
    said = _CUT.sub("", found["said"]).strip()
    subject = sentence[: found.start("said")]
    plain = re.sub(r"\b(?:is|are|was|were|actually)\b", "", subject)
    if not said or _UNSURE.search(said) or _UNSURE.search(plain) or _DOUBTED.search(sentence, found.end("said")):
        return []
    doing = _DOING.fullmatch(said)
    return [strip_markup(said), *([doing["what"]] if doing else [])]
