"""The value that a phrase or a sentence names: `so there are $12$ apples, because ...` is `12 apples`.

Values are formulas, numbers with their units, and bare formulas such as y = -2x + 5. Never raises, and linear in the
length of the text but for brackets, of which a few are looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmill.rewards.answers.numerals import CHINESE, HAN, MEASURES
from rollmill.rewards.answers.passage import Formula, Passage
from rollmill.rewards.answers.writing import CJK

LONGEST_PHRASE = 2000

_FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sqrt|log|ln|exp|pi|infty|infinity|max|min|lim"
_COMMAND = re.compile(
    r"\\(?:begin\{(?P<env>\w+)\*?\}.{0,1500}?\\end\{(?P=env)\*?\}|[A-Za-z]+\*?|[{}%,;!|\\ ])"
    r"(?:\s?(?:\[[^\[\]{}]{0,20}\])?\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}){0,2}",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"\d{1,30}分之\d{1,30}|[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?![\d,]|\.\d)"
    r"|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w]))?(?: \d{1,9}/\d{1,9}(?![\d/]))?|\.\d+"
)
_WORD = re.compile(
    rf"\d+(?:st|nd|rd|th)\b(?! root)|\d+-[A-Za-z]{{2,}}[A-Za-z-]*|[A-Za-z]-[A-Za-z]{{2,}}[A-Za-z-]*"
    rf"|(?!(?:{_FUNCTION})(?![a-z]))[A-Za-z]{{2,}}(?:[-'’][A-Za-z]+)*|第[{HAN}\d]+|[{CJK}]|['’\"“”]"
)
_FUNCTIONS = re.compile(rf"(?:{_FUNCTION})(?![a-z])")
_LETTER = re.compile(r"[A-Za-zα-ωΔΩθ]['′]{0,2}(?:_(?:\{[^{}]{1,20}\}|\w))?")
_OPERATOR = re.compile(r"<=|>=|!=|\*\*|->|[-+*/^=<>≤≥≠≈±·×÷∪∩∈:−–~|]")
_SIGN = re.compile(r"[°%‰!√π∞∅²³⁴⁵⁶⁷⁸⁹⁰¹½¼¾⅓⅔′″{}_①-⑳]")
_OPEN = "(["
_CHINESE_VALUE = re.compile(
    rf"(?<![第{HAN}])(?:{CHINESE})(?=[{MEASURES}元角分米克吨升秒天年月日周岁个厘毫千公斤平立度\s,，。.;；!！)]|$)"
)
_LABELLED = re.compile(
    r"(?:\b(?:step|case|fig(?:ure)?|question|equation|eq|part|problem|section|theorem|example|method|type|option|choice"
    r"|chapter|page|line|row|item|no|number|solution|scenario|phase|stage|point|way)\.?|第|步骤|方法|情况|图|题)\s*[#(]?$",
    re.IGNORECASE,
)
_ENUMERATED = re.compile(r"(?:^|\n)[ \t>*]*\(?\d{1,2}[.)](?=\s)")

_UNIT_STOP = frozenset(
    [
        "in",
        "on",
        "of",
        "at",
        "to",
        "for",
        "left",
        "remaining",
        "that",
        "which",
        "who",
        "when",
        "where",
        "while",
        "if",
        "because",
        "since",
        "as",
        "and",
        "or",
        "but",
        "so",
        "with",
        "by",
        "from",
        "than",
        "then",
        "more",
        "fewer",
        "less",
        "greater",
        "larger",
        "smaller",
        "each",
        "total",
        "altogether",
        "overall",
        "is",
        "are",
        "was",
        "were",
        "be",
        "after",
        "before",
        "during",
        "between",
        "the",
        "a",
        "an",
        "this",
        "these",
        "those",
        "today",
        "now",
        "they",
        "he",
        "she",
        "it",
        "we",
        "i",
        "you",
        "using",
        "such",
        "only",
        "instead",
        "out",
        "away",
        "per_",
        "not",
        "also",
        "respectively",
        "until",
        "every",
        "together",
        "combined",
        "again",
        "here",
        "there",
        "has",
        "have",
        "had",
        "does",
        "do",
        "did",
        "can",
        "could",
        "will",
        "would",
        "should",
        "may",
        "might",
        "must",
        *(
            "get",
            "gets",
            "got",
            "cost",
            "costs",
            "need",
            "needs",
            "show",
            "shows",
            "make",
            "buy",
            "sell",
            "sold",
            "walked",
        ),
        *(
            "bought",
            "eat",
            "earn",
            "earns",
            "take",
            "takes",
            "pay",
            "pays",
            "gives",
            "give",
            "weigh",
            "weighs",
            "yields",
        ),
        *(
            "remains",
            "remain",
            "satisfies",
            "satisfy",
            "holds",
            "hold",
            "matches",
            "follows",
            "sitting",
            "standing",
            "visible",
        ),
        *("exactly", "about", "approximately", "possible", "works", "apiece"),
        "equals",
        "equal",
        "makes",
        "given",
    ]
)
_UNIT = re.compile(
    rf"\s?(?:\\?%|°[CF]?|[€£¥])|[\s-]?(?P<word>[A-Za-zµΩ]+(?:[-/][A-Za-z]+)*\.?)(?:\^\{{?-?\d\}}?|[²³]|(?<=m)\d(?!\d))?"
    rf"|\s?[/每]?(?P<chinese>(?![是的和与或即且没不就才都也还在了吗呢吧共可能那而但所因只有到至又零])[{CJK}])"
)
_MOST_UNITS = 5
_MOST_OPERATORS = 4
"""Operators that may follow each other in a formula: a row of thousands of dashes is no formula."""
_JOINER = re.compile(
    r"\s*\(?(?:[,;、，；]?\s*(?:and|or|and/or|以及|和|与|或者?|还是|及|且|到|至|~|–)(?![A-Za-z])|[,;、，；]|\bto\b|\\quad|&)\s*"
    r"(?:also |even |maybe |perhaps |possibly |either |是 ?|为 ?)?",
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
_ASIDE = re.compile(
    r"(?<!\\)\s*[(（](?=[^()（）]*(?:[A-Za-z]{3,}|[\u4e00-\u9fff]{2,}|[A-Za-z]{1,2}\s*=))([^()（）\\$]{1,300})[)）]"
)
_PREPOSITION = re.compile(
    r"(?:\b(?:in|on|at|when|for|if|where|with|after|from|by|than|per|during|within|between|until|since|over|near|beside|behind|around|modulo|mod"
    r"|given|into|every|each|out of|instead of|not|of the|because|as|assuming|divided|multiplied|times|using|nearest"
    r"|except|excluding|without|minus|plus|to|other|another|first|last|next|previous|initial|original|all|these|those"
    r"|both)|除以|乘以|比[^,，。]{0,12}|的第|在|当|若|如果|比|从|每|把|将|向|(?<![A-Za-z])n't|不是|不为|不等于)"
    r"\s*(?:the|a|an|his|her|their|its|my|our|your|x\s*=|[a-z]\s*=|year|years|day|days)?\s*$",
    re.IGNORECASE,
)
_RESULTING = re.compile(
    r"(?:\b(?:left|leav\w+|ends? up|ended up|start over|find|remain\w*)(?: \w+)? with|\b(?:com\w+(?: out)?"
    r"|amounts?|adds? up|equals?|equal|simplif\w+"
    r"|reduc\w+|evaluat\w+|round\w*|converg\w+|work\w* out|boil\w* down|sums?|totals?|corresponds?"
    r"|equates?) to|\b(?:arriv\w+|st(?:an|oo)ds?|stands?|peak\w*|valued|s[ia]ts?|is|was) at|\bresult\w* in)\s*$",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:more|less|greater|fewer|larger|smaller|higher|lower|bigger) than|\b(?:at least|at most|over"
    r"|under|above|below|up to"
    r"|no more than|no less than|almost|nearly|between|from)|大于"
    r"|小于|超过|不到|至少|至多|不少于|不超过|不足|多于|少于|高于|低于|介于|±)"
    r"\s*(?:or equal to\s*)?$",
    re.IGNORECASE,
)
_DETAIL = re.compile(
    r"\b(?:of|for|to|in|on|at|from|with|over|per|than|because|since|when|if|as|while|by|and)\b[^,.;=]{0,30}$",
    re.IGNORECASE,
)
_DELIMITERS = re.compile(
    r"\$\$?|\\[\[\]()]|\\(?:begin|end)\{(?:aligned|align|gathered|gather|equation|split|eqnarray)\*?\}"
    r"|\\therefore(?![A-Za-z])"
)
_SIDES = re.compile(r"=|\\(?:simeq|approx|sim|equiv|[Rr]ightarrow|Longrightarrow|implies|to)(?![A-Za-z])|≈")
_WHOLE = re.compile(
    r"\\begin|\\(?:text|mathrm|quad)\s*\{? ?(?:or|and)\b|[<>]|\\(?:le|ge|lt|gt|leq|geq|neq)(?![a-z])"
    r"|, ?[A-Za-z]\w* ?=|\bor\b"
)
_NAMES = re.compile(
    r"(?<!\\)(?<![A-Za-z])(?!(?:cdot|times|frac)(?![a-z]))[A-Za-z]"
    r"|\\(?:theta|lambda|omega|mu|sigma|alpha|beta|phi|pi|nu|tau|Delta)"
)
_NAMED = re.compile(r"\$?[A-Za-z](?:_\w)?\s*=\s*[-+]?[\d.,/]+\$?")
_CUT_SIDE = re.compile(r"(?:[-+*/×÷)−–]|\d\s*[xX]|\b(?:times|plus|minus|by|of|and))\s*\$?\s*$")
_NEGATIVE = re.compile(r"(?:负|零下)$")
_BOUND_BEHIND = re.compile(
    rf"\s*[{CJK}]?\s*(?:以上|以下|以内|左右|之间|多(?=[{CJK}]))|\s*(?:[a-z]+\s+)?or (?:more|less|fewer|greater|higher"
    rf"|lower|above|below|so)\b|\+(?!\d)",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:\s|[:*_>#\"“”'‘’]|-\s|(?:(?:therefore|thus|hence|so|then|just|simply|exactly|approximately|about|roughly|nearly|around"
    r"|clearly|indeed|now|actually|really|probably|likely|also|only|always|given by|equal to|equals"
    r"|found to be|that|both|either"
    r"|option|choice|approx)\b|大约|约|是|为|等于|共|有|就|应|该)[ ,:]*)*",
    re.IGNORECASE,
)


_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|mbox)\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a phrase: where it stands, and where the unit behind it ends."""

    start: int
    end: int
    unit_end: int


def tidy(text: str) -> str:
    """The phrase without bold marks, quotes, code marks and punctuation around it."""
    wrapped = _WRAPPED.fullmatch(text.strip(" \t\n*$.").removeprefix("\\(").removesuffix("\\)").strip())
    text = wrapped[1] if wrapped is not None else text
    text = re.sub(r"\*\*|__(?=\S)|(?<=\S)__", "", text).strip().strip("`").strip(" \t\n*:,，;；。")
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def without_asides(text: str) -> str:
    """The text without remarks in parentheses: `5 cats (2 black, 3 white)`. Alternatives in them stay."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if re.match(r"\s*(?:or|and|maybe|perhaps|或)\b", found[1], re.IGNORECASE) else " "

    return _ASIDE.sub(kept, text) if "(" in text else text


def value_of(phrase: str, *, leads: bool) -> str:
    """The value that a phrase names, with its unit; the phrase itself, tidied, where it has none.

    Several values that "or", "and" or commas join are one. Where there are others, the last counts that is no
    circumstance such as "in 2019".

    Args:
        leads: the phrase stands behind a marker such as "the answer is", so a value at its beginning is the answer.
    """
    text = tidy(without_asides(phrase[:LONGEST_PHRASE]))
    groups = _groups(text, values(text))
    if not groups:
        return _without_reason(text)
    reason = _REASON.search(text, groups[0].end)
    if reason is not None and "=" not in text[reason.end() :]:
        groups = [group for group in groups if group.start < reason.start()]
    lead = _LEAD.match(text)
    is_subject = (
        len(groups) > 1 and re.match(f"[{CJK}]", text[groups[0].unit_end :]) is not None
    )  # `1吨稻谷可碾米750千克`
    if leads and lead is not None and groups[0].start <= lead.end() + 1 and not is_subject:
        return _written(text, groups[0])
    chosen = next((group for group in reversed(groups) if not _is_circumstance(text, group)), groups[-1])
    if not leads and (computed := _computed(text, groups)) is not None:
        chosen = computed
    written = _written(text, chosen)
    return written if leads else last_side(written)


def _computed(text: str, groups: list[Value]) -> Value | None:
    """The last value that is computed, as in `50 / 10 = 5 days to use 50 liters`, where only details follow it."""
    for group in reversed(groups):
        if "=" in text[group.start : group.end]:
            return group
        if not _DETAIL.search(text, max(0, group.start - 40), group.start):
            return None
    return None


def last_side(formula: str) -> str:
    r"""The last side of a worked chain with names in it, as in `s = f \theta = 50`; other formulas as they are.

    A chain of plain numbers stays whole, because every side of it has to be right.
    """
    inner = _DELIMITERS.sub(" ", formula).replace("&", " ")
    rows = [row.strip() for row in inner.split("\\\\") if row.strip()]
    sides = [side.strip(" .,;") for side in _SIDES.split(rows[-1] if rows else "")]
    is_chain = len(rows) > 1 or len(sides) > 2 or "arrow" in inner
    if not is_chain or _WHOLE.search(inner) or not sides[-1] or not _NAMES.search(" ".join([*rows[:-1], *sides[:-1]])):
        return formula
    return sides[-1]


def has_conclusion(sentence: str) -> bool:
    """Whether a sentence names a value that does not only say when or where."""
    text = tidy(without_asides(sentence[:LONGEST_PHRASE]))
    return any(not _is_circumstance(text, group) for group in _groups(text, values(text)))


def _is_circumstance(text: str, group: Value) -> bool:
    """Whether a value only says when or where, as in "in 2019" or "for n = 4"."""
    before = max(0, group.start - 40)
    if "=" in text[group.start : group.end]:
        return False
    if _RESULTING.search(text, before, group.start) or text.startswith(("$$", "\\["), group.start):
        return False
    return _PREPOSITION.search(text, before, group.start) is not None


def _written(text: str, group: Value) -> str:
    """The group as it is written, with what makes it a bound, as in `less than 9` and `9页以上`."""
    before = _BOUND_BEFORE.search(text, max(0, group.start - 40), group.start)
    behind = _BOUND_BEHIND.match(text, group.end) or _BOUND_BEHIND.match(text, group.unit_end)
    negative = _NEGATIVE.search(text, 0, group.start)
    start = (before or negative).start() if before or negative else group.start  # type: ignore[union-attr]
    written = text[start : behind.end() if behind else group.unit_end].strip().strip("_")
    if "=" in written and _CUT_SIDE.search(text, max(0, group.start - 20), group.start):
        written = written.rpartition("=")[
            2
        ].strip()  # of `72 cubic feet * 3/4 = 54 cubic feet` the left side is no formula
    return written.replace(" (or ", " or ") if written.count("(") > written.count(")") else written


def has_value(text: str) -> bool:
    """Whether it has a number or a formula."""
    return bool(values(text[:LONGEST_PHRASE]))


def _without_reason(text: str) -> str:
    found = _TRAILING.search(text, 1)
    return tidy(text[: found.start()]) if found is not None and text[: found.start()].strip() else text


def _groups(text: str, found: list[Value]) -> list[Value]:
    """Values that stand in one list, as in `x = 2 or x = 3`, as one."""
    groups: list[Value] = []
    for value in found:
        between = text[groups[-1].unit_end : value.start] if groups else ""
        unit = text[groups[-1].end : groups[-1].unit_end].strip() if groups else ""
        goes_on = unit != "" and " " not in unit and value.unit_end > value.end and between in ("", " ", "又", "零")
        if groups and (goes_on or _JOINER.fullmatch(between) or _JOINER.fullmatch(text[groups[-1].end : value.start])):
            groups[-1] = Value(groups[-1].start, value.end, value.unit_end)
        else:
            groups.append(value)
    return groups


def values(text: str) -> list[Value]:
    """All values of a text, in order."""
    passage = Passage(text)
    found: list[Value] = []
    at = 0
    while at < len(text):
        run = _run(text, at, passage)
        if run is None:
            at = _next(text, at)
            continue
        start, end = run
        if _counts(text, start, end, passage):
            found.append(Value(start, end, _unit_end(text, start, end)))
        at = max(end, at + 1)
    if not found:
        found = [
            Value(each.start(), each.end(), _unit_end(text, each.start(), each.end()))
            for each in _CHINESE_VALUE.finditer(text)
        ]
    return found


def _next(text: str, at: int) -> int:
    """The next place where a value may begin: behind a word or one sign."""
    word = _WORD.match(text, at)
    return word.end() if word is not None else at + 1


def _run(text: str, at: int, passage: Passage) -> tuple[int, int] | None:
    """Start and end of the longest formula that begins at a place."""
    end, joined, last_end = at, True, at
    brackets = operators = 0
    while True:
        gap = end < len(text) and text[end] == " " and end > at
        place = end + 1 if gap else end
        if place >= len(text):
            break
        kind, stop = _token(text, place, passage)
        if kind == "operator":
            if (
                gap
                and text[place] in "-–"
                and text[place + 1 : place + 2] == " "
                and not _starts(text, place + 2, passage)
            ):
                break
            if place == at and text[place] not in "-−+±~√|":
                break
            joined, end = True, stop
            operators += 1
            if operators > _MOST_OPERATORS:
                break
            continue
        if kind is None or (gap and not joined and kind not in ("command", "bracket")):
            break
        if gap and kind == "bracket" and not joined:
            break
        if kind == "letter" and place == at and not _is_variable(text, place, stop):
            break
        brackets += kind == "bracket"
        operators = 0
        end = last_end = stop
        joined = kind == "command" and text[stop - 1] != "}"
    return (at, last_end) if last_end > at and brackets < 40 else None


def _token(text: str, at: int, passage: Passage) -> tuple[str | None, int]:
    formula = passage.formula_at(at)
    if formula is not None:
        return ("formula", formula.end) if at == formula.start else (None, at)
    if text[at] == "{":
        end = _closing(text, at)
        return ("bracket", end) if end is not None else (None, at)
    enumerated = _ENUMERATED.match(text, at)
    if enumerated is not None and (at == 0 or text[at - 1] == "\n"):
        return None, at
    if text.startswith("\\{", at) and (end := _closing(text, at + 1)) is not None:
        return "bracket", end
    for kind, pattern in (("command", _COMMAND), ("word", _WORD), ("number", _NUMBER), ("function", _FUNCTIONS)):
        found = pattern.match(text, at)
        if found is not None:
            return (None if kind == "word" else kind), found.end()
    if text[at] in _OPEN:
        end = _closing(text, at)
        return ("bracket", end) if end is not None else (None, at)
    for kind, pattern in (("letter", _LETTER), ("operator", _OPERATOR), ("sign", _SIGN)):
        found = pattern.match(text, at)
        if found is not None:
            return kind, found.end()
    return None, at


def _starts(text: str, at: int, passage: Passage) -> bool:
    return at < len(text) and _token(text, at, passage)[0] in ("number", "command", "formula", "bracket")


def _closing(text: str, at: int) -> int | None:
    """Behind the bracket that closes the one at `at`; None where what is inside is no formula."""
    depth = 0
    for place in range(at, min(len(text), at + 400)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            inside = text[at + 1 : place]
            plain = re.sub(r"\\[A-Za-z]+", "", inside)
            words = re.findall(r"[A-Za-z]{2,}", _FUNCTIONS.sub("", plain))
            prose = any(re.search("[aeiou]", word) and len(word) > 2 for word in words) or re.search(f"[{CJK}]", inside)
            return None if prose or not inside.strip() else place + 1
    return None


def _is_variable(text: str, at: int, end: int) -> bool:
    """Whether a lone letter begins a formula: `x = 5`, but not `a cat`, `A is` or `I`."""
    behind = text[end : end + 12]
    return bool(
        re.match(r"\s?(?:[=<>≤≥≠≈∈]|\\(?:le|ge|in|neq|approx|to)(?![a-z]))|[-+*/^(_\d]|\s[+*/^-]\s", behind)
    ) and not (re.match(r"-[A-Za-z]{2}", text[end : end + 3]))


def _counts(text: str, start: int, end: int, passage: Passage) -> bool:
    """Whether a run of signs is a value rather than a mark, a word or the number of a step."""
    run = text[start:end]
    formula: Formula | None = passage.formula_at(start)
    if formula is not None and formula.end >= end:
        return bool(formula.inner)
    if not re.search(r"[\dπ∞∅√\\①-⑳]|[A-Za-z]\s?[=<>≤≥≠^+*/(-]|[=+*/]\s?[A-Za-z]|infty|infinity|\(", run):
        return False
    if re.fullmatch(r"\([A-Za-z]\)|\(?\d{1,2}\)", run) and start and text[start - 1] not in " \n:：":
        return False
    return not (re.match(r"[#(]?\d", run) and _LABELLED.search(text, max(0, start - 14), start))


def _unit_end(text: str, start: int, end: int) -> int:
    """Where the unit behind a value ends, such as ` square feet per second` or `个苹果`.

    Of equations only those of a name and a number have one, as in `v = 18 km/h`.
    """
    run = text[start:end]
    is_relation = re.search(r"[A-Za-z]\)?\s*[=<>]|\\\{|[<>]", run) is not None and _NAMED.fullmatch(run) is None
    for _ in range(0 if is_relation else _MOST_UNITS):
        found = _UNIT.match(text, end)
        if found is None or found.end() == end:
            break
        word = found["word"]
        if word is not None and (word.lower().rstrip(".") in _UNIT_STOP or (len(word) == 1 and text[end] != " ")):
            break
        if word is not None and text[end : end + 1] == "-" and len(word) > 12:
            break
        end = found.end()
    return end
