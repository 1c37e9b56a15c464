"""Answers by type of question: orders, pairs, blanks, truth values, and short answers by key points."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from rollmill_grading.collection import split_list
from rollmill_grading.errors import GradingError
from rollmill_grading.extraction import FinalAnswer
from rollmill_grading.normalization import comparison_key, fold_text, has_cjk, parse_circled_digit
from rollmill_grading.phrase import extract_value
from rollmill_grading.quantities import normalize_answer

_ARROW = re.compile(
    r"\s*(?:-+>|=+>|→|⇒|\\(?:to|rightarrow|Rightarrow)(?![A-Za-z])|>|<|[,;、–—\n]"
    r"|(?<=\w)-|-(?=\s)|\b(?:followed by|and|then|finally|first|next|last|lastly)\b|首先|先|再|然后|接着|最后)+\s*",
    re.IGNORECASE,
)
_WRAPPING = re.compile(r"[()\[\]{}$\"'“”‘’`.。]|\\(?:text|mathrm)\s*\{")
_ENDS_OF_ORDER = re.compile(
    r"(?<=\A[A-Z]) (?:comes|goes|is) first\b|(?<=\A[①-⑳]) (?:comes|goes|is) first\b"
    r"|(?<= [A-Z①-⑳]) (?:comes|goes|is) (?:last|at the end)(?=[.!]*\Z)"
)
"""Words that say what the place in the text says, too: `B comes first, ..., and C is last`."""
_NUMBERED = re.compile(r"(?m)^\s*\d{1,2}[.)]\s+")
_PAIR_SIGN = (
    r"\s*[)\]）.》”\"]?\s*(?:-+>?|=+>?|–|—|→|⇒|:|~|\\(?:to|rightarrow)(?![A-Za-z])|↔|对应|配|(?i:matches|(?:goes"
    r"|pairs|matched|is matched|corresponds) (?:with|to)|belongs to|with|is|to)(?![A-Za-z])|是)?"
    r"\s*[(\[（《“\"]?\s*(?:(?i:an?|the) )?"
)


def parse_sequence(answer: Any) -> list[str]:
    """Parse a reference sequence: a list, `B, A, C`, `②①③` or `BAC`. Raises GradingError for fewer than two labels."""
    labels = [str(each) for each in answer] if isinstance(answer, list | tuple) else _labels_of(fold_text(str(answer)))
    labels = [_label(each) for each in labels]
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise GradingError(
            f"its answer {answer!r:.80} is not an order; give at least two different labels, as in [B, A, C]"
        )
    return labels


def extract_order(found: FinalAnswer, gold: Sequence[str], options: Mapping[str, str]) -> list[str] | None:
    """Return the labels of `gold` in the order of the answer; None if it is not an arrangement of all of them.

    Option texts stand for their letters.
    """
    names = {_label(letter): letter for letter in gold} | {
        comparison_key(options[name]): name for name in gold if name in options
    }
    for each in (found.text, _NUMBERED.sub("", found.tail)):
        text = _ENDS_OF_ORDER.sub("", re.sub(r"[^\S\n]+", " ", each).strip())
        for pieces in (_ARROW.split(text.strip()), _labels_of(text)):
            items = [piece for piece in pieces if piece.strip(" .。")]
            if len(items) != len(gold):
                continue
            labels = [names.get(_label(piece)) or names.get(comparison_key(piece)) for piece in items]
            if sorted(label or "" for label in labels) == sorted(gold):
                return [label for label in labels if label]
    return None


def kendall_tau(gold: Sequence[str], answer: Sequence[str]) -> float:
    """Return Kendall's tau of two orders of the same labels: 1 minus twice the share of swapped pairs."""
    place = {label: index for index, label in enumerate(answer)}
    pairs = list(combinations(gold, 2))
    swapped = sum(place[first] > place[second] for first, second in pairs)
    return 1 - 2 * swapped / len(pairs)


def _labels_of(text: str) -> list[str]:
    text = _WRAPPING.sub(" ", _ARROW.sub(" ", text.strip())).strip()
    return text.split() if " " in text else list(text)


def _label(text: str) -> str:
    text = _WRAPPING.sub("", text).strip()
    number = parse_circled_digit(text)
    return str(number) if number is not None else text.upper() if len(text) == 1 else comparison_key(text)


def parse_pairs(answer: Any) -> dict[str, str]:
    """Parse reference pairs: a mapping, a list of pairs, or `1-A, 2-C`. Raises GradingError if there are none."""
    if isinstance(answer, Mapping):
        found = {str(left): str(right) for left, right in answer.items()}
    elif isinstance(answer, str):
        sides = [re.split(r"\s*(?:-+>?|–|—|→|:)\s*", piece) for piece in re.split(r"[,;、\n]", fold_text(answer))]
        found = {side[0]: side[1] for side in sides if len(side) == 2}
        found = found if len(found) == len(sides) else {}
    else:
        listed = answer if isinstance(answer, list | tuple) else []
        found = {str(each[0]): str(each[1]) for each in listed if isinstance(each, list | tuple) and len(each) == 2}
        found = found if len(found) == len(listed) else {}
    if not found:
        raise GradingError(f"its answer {answer!r:.80} has no pairs; give a mapping such as {{1: B, 2: A}}")
    return {_label(left): _label(right) for left, right in found.items()}


def extract_pairs(found: FinalAnswer, gold: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs of an answer, left to right, without contradictory ones.

    A left side with two right sides is dropped. So is every left side whose right side is used more often than in the
    reference, so that matching everything with everything earns nothing.
    """
    given = max((_given(text, gold) for text in (found.text, found.tail)), key=len)
    rights: dict[str, set[str]] = {}
    for left, right in given:
        rights.setdefault(left, set()).add(right)
    uses = Counter(right for several in rights.values() for right in several)
    allowed = Counter(gold.values())
    return {
        left: right
        for left, several in rights.items()
        for right in several
        if len(several) == 1 and (right not in allowed or uses[right] <= allowed[right])
    }


def _given(text: str, gold: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return all pairs of a text, in either direction."""
    one, other = _any_of(gold), _any_of([*gold.values(), *"ABCDEFGHIJ"])
    for sign in (_PAIR_SIGN, r"\s*,\s*"):
        forth = re.findall(rf"{one}{sign}{other}", text, re.IGNORECASE)
        back = [] if forth else re.findall(rf"{other}{sign}{one}", text, re.IGNORECASE)
        if forth or back:
            return [(_label(left), _label(right)) for left, right in forth or [each[::-1] for each in back]]
    return []


def _any_of(labels: Iterable[str]) -> str:
    """Return a regular expression group for any of the labels, numbers also circled, but not inside a longer one."""
    forms = {form for label in labels for form in (label, *_circled(label))}
    longest_first = "|".join(_bounded(form) for form in sorted(forms, key=len, reverse=True))
    return f"({longest_first})"


def _bounded(form: str) -> str:
    if form.isdigit():
        return rf"(?<![\d.]){form}(?!\.?\d)"
    return rf"(?<![A-Za-z]){re.escape(form)}(?![A-Za-z])" if form.isascii() else re.escape(form)


def _circled(label: str) -> tuple[str, ...]:
    return (chr(ord("①") + int(label) - 1),) if label.isdigit() and 1 <= int(label) <= 20 else ()


# Fill-in-the-blank answers: assigns the texts of an answer to the blanks.

_LABEL = re.compile(
    r"(?:(?<![A-Za-z^_])\((?P<a>\d{1,2})\)|(?:^|(?<=[\s,;、。.]))(?P<b>\d{1,2})[.、)](?=\s|\D)|第(?P<c>[一二三四五六七八九十\d])[个]?(?:空|问|小题)[是为填:]*"
    r"|(?:(?i:blank|answer|part)|空) ?\(?(?P<e>\d{1,2})\)? ?(?:(?i:is|should be)\b|:)?"
    r"|(?i:\b(?:the )?(?P<f>first|second|third|fourth|fifth|sixth)(?: (?:blank|answer|one|space|value"
    r"|part))?(?: (?:is|should be)\b|:))|(?P<d>[①-⑳]))[ :：.、]*"
)
_ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
_HAN = "一二三四五六七八九十"
_STRONG = re.compile(r"\s*[;；、\n]\s*")
_ORDINAL = re.compile(r"\b(?:second|blank \(?2)\b|第[二2]|空2", re.IGNORECASE)
_BOTH = re.compile(r"\s*(?:和|与|以及)\s*")
_LEADING = re.compile(r"(?:so|thus|therefore|hence|the answers? (?:to|for|in|of)|所以|因此|,|:|\s)*", re.IGNORECASE)
_OUTER = " \t\n,;，；。、"


def parse_blanks(found: FinalAnswer, paragraph: str, count: int) -> list[tuple[str, str]] | None:
    """Return the texts in `count` blanks and their values, in order; fewer if fewer are filled, None if more.

    Several boxes are one blank each. In a single text the blanks are numbered, or separated by 、, semicolons or
    commas. `paragraph` is the last one of the completion, which may hold labels such as "the second blank".
    """
    texts = _texts(found, paragraph, count)
    return None if texts is None else [(text, extract_value(text, leads=True)) for text in texts]


def _texts(found: FinalAnswer, paragraph: str, count: int) -> list[str] | None:
    if not found.boxes and _ORDINAL.search(paragraph) and (numbered := _numbered(paragraph, count)) is not None:
        return numbered
    for contents in (found.boxes[len(found.boxes) - found.joined :], found.boxes):
        if len(contents) == count:
            return list(contents)
    if found.joined > 1:
        return list(found.boxes[-found.joined :]) if found.joined < count else None
    for text in (found.text, found.tail):
        if (numbered := _numbered(text, count)) is not None:
            return numbered
    plain = normalize_answer(found.text)
    value = normalize_answer(extract_value(found.text, leads=found.marked))
    lists = (split_list(plain), split_list(plain, thousands=False), split_list(value))
    for pieces in (_parted(found.text), *lists, _BOTH.split(found.text)):
        if pieces is not None and len(pieces) == count:
            return [piece.strip(_OUTER) for piece in pieces]
    rest = _parted(found.text)
    return rest if len(rest) < count else None


def _numbered(text: str, count: int) -> list[str] | None:
    """Return the texts after the labels 1 to `count`, each of which occurs once, the first at the start."""
    found = list(_LABEL.finditer(text))
    kinds = [[label for label in found if label[kind]] for kind in "abcdef"]
    labels = next(
        (each for each in (found, *kinds) if [_number(label) for label in each] == list(range(1, count + 1))), None
    )
    if not labels or _LEADING.sub("", text[: labels[0].start()]):
        return None
    ends = [*(label.start() for label in labels[1:]), len(text)]
    pieces = [text[label.end() : end].strip(_OUTER) for label, end in zip(labels, ends, strict=True)]
    return [
        re.sub(r"\s*(?:,?\s*(?:\band|和|而|,))?(?:,?\s*the answers? (?:to|for|in|of))?$", "", piece) for piece in pieces
    ]


def _number(label: re.Match[str]) -> int | None:
    if label["d"]:
        return parse_circled_digit(label["d"])
    if label["c"] and label["c"] in _HAN:
        return _HAN.index(label["c"]) + 1
    if label["f"]:
        return _ORDINALS.index(label["f"].lower()) + 1
    return int(label["a"] or label["b"] or label["c"] or label["e"])


def _parted(text: str) -> list[str]:
    return [piece.strip(_OUTER) for piece in _STRONG.split(text.strip(_OUTER))]


def count_matched_blanks(same: Sequence[Sequence[bool]]) -> int:
    """Return the maximum number of right blanks if answers may go to any blank, each to one: a largest matching.

    `same[i][j]`: blank i may hold answer j.
    """
    holder: dict[int, int] = {}

    def place(blank: int, tried: set[int]) -> bool:
        for answer, fits in enumerate(same[blank]):
            if fits and answer not in tried:
                tried.add(answer)
                if answer not in holder or place(holder[answer], tried):
                    holder[answer] = blank
                    return True
        return False

    return sum(place(blank, set()) for blank in range(len(same)))


# Parses true or false, in words and signs of both languages.

_TRUE = frozenset(
    [
        *("true", "t", "yes", "y", "correct", "right", "对", "对的", "正确", "正确的", "是", "是的"),
        *("对了", "没错", "是对的", "是正确的", "真", "√", "✓", "✔", "☑", "✅", "\\checkmark", "\\surd"),
        *("hold", "holds", "成立"),
    ]
)
_FALSE = frozenset(
    [
        *("false", "f", "no", "n", "incorrect", "wrong", "untrue", "错", "错的", "错误", "错误的", "否"),
        *("不是", "不对", "不正确", "是错的", "是错误的", "错了", "假", "×", "✗", "✘", "✕", "❌", "x", "\\times"),
        *("有误", "有错"),
    ]
)
_NEGATION = (
    r"(?:(?:\bnot|n't|\bnever|\bhardly)\s+(?:(?:think|believe|say|the case)\s+)?(?:that\s+)?(?:[\w']+\s+){0,3}"
    r"|(?:不|没有|没|并非|不是|并不|并没有|非)\s*(?:是|完全|一定|都)?\s*)"
)
_WORD = re.compile(
    rf"(?P<not>{_NEGATION})?(?P<word>\b(?:true|false|correct|incorrect|right|wrong|untrue)\b|正确|错误|有误|有错(?!误)"
    r"|\bholds?\b(?= true\b|[\s.!]*$|[,;])|成立(?=\W|$)"
    r"|(?<![对错])对(?=[的了]|\W|$)|(?<!对)错(?=[的了]|\W|$)|[√✓✔✅×✗✘✕❌])",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[,;:，；：。.]|\s-\s|—|\b(?:because|since|as|for)\b|因为|由于|\n", re.IGNORECASE)
_HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|either|neither|both|whether|unsure|(?:cannot|can't|don't|not) (?:say"
    r"|tell|know|sure))\b"
    r"|或|也许|可能|是否|是不是|是对是错|还是|对不对|/",
    re.IGNORECASE,
)


def parse_truth_value(text: str) -> bool | None:
    """Return the truth value that a text states; None if it states neither or both.

    `text` is folded. Its first clause decides, unless the whole text hedges between the two.
    """
    if text.rstrip(" .").endswith(("?", "吗")):
        return None
    value = _of_clause(text)
    if value is not None:
        return value
    clause = _CLAUSE_END.split(text, maxsplit=1)[0]
    value = _of_clause(clause)
    if value is None or (_HEDGE.search(text) and _polarities(text) == {True, False}):
        return None
    rest = text[len(clause) :].strip(" ,;:.-—。\n")
    return None if _of_word(rest) is (not value) else value


def _of_clause(clause: str) -> bool | None:
    found = _of_word(clause)
    if found is not None or _HEDGE.search(clause):
        return found
    values = _polarities(clause)
    return values.pop() if len(values) == 1 else None


def _of_word(text: str) -> bool | None:
    word = text.strip(" \t.,;:。!()[]{}$\"'“”‘’`").lower()
    word = re.sub(r"^\\text\s*\{(.*)$", r"\1", word).strip()
    return True if word in _TRUE else False if word in _FALSE else None


def _polarities(text: str) -> set[bool]:
    """Return the truth values of all words in a text, with negations applied."""
    return {(_of_word(found["word"]) is True) != bool(found["not"]) for found in _WORD.finditer(text)}


# Short answers: scored by a judge with a rubric, or by the task's key points.

_MARK = re.compile(r"\bfinal answer\s*:|\banswers?\s*:|(?<![解问回])答\s*:|答案\s*(?:是|为|:)+", re.IGNORECASE)
_NEGATED = re.compile(
    r"(?:\b(?:not|no|never|without|nor|isn't|doesn't|don't|cannot|can't)(?:\s+\w+){0,2}\s+|(?:不是|并非|不|没有|无|非)(?:\w{0,2}))$",
    re.IGNORECASE,
)


def extract_short_answer(text: str) -> str:
    """Return the text after the last "Answer:", or all of it."""
    text = fold_text(text)
    marks = list(_MARK.finditer(text))
    return (text[marks[-1].end() :] if marks else text).strip()


def key_point_credit(
    answer: str, points: Sequence[Sequence[str]], weights: Sequence[float], wrong: Sequence[str]
) -> float:
    """Return the share of the key points that an answer contains, in one of their wordings and not negated.

    0 if it contains one of `wrong`.
    """
    answer = " ".join(answer.casefold().split())
    if any(_contains(answer, wording) for wording in wrong):
        return 0.0
    met = [any(_contains(answer, wording) for wording in wordings) for wordings in points]
    return sum(weight for weight, is_met in zip(weights, met, strict=True) if is_met) / sum(weights)


def _contains(answer: str, wording: str) -> bool:
    wording = " ".join(fold_text(wording).casefold().split())
    pattern = re.escape(wording) if has_cjk(wording) else rf"(?<!\w){re.escape(wording)}(?!\w)"
    return any(not _NEGATED.search(answer[max(0, at.start() - 40) : at.start()]) for at in re.finditer(pattern, answer))
