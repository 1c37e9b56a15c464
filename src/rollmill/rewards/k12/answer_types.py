"""Ordering and matching: sequences of labels, and pairs of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from rollmill.errors import RewardError
from rollmill.rewards.answers.extraction import FinalAnswer
from rollmill.rewards.answers.normalization import comparison_key, fold_text, parse_circled_digit

_ARROW = re.compile(
    r"\s*(?:-+>|=+>|→|⇒|\\(?:to|rightarrow|Rightarrow)(?![A-Za-z])|>|<|[,;、–—\n]"
    r"|(?<=\w)-|-(?=\s)|\b(?:and|then|finally|first|next|last|lastly)\b|首先|先|再|然后|接着|最后)+\s*",
    re.IGNORECASE,
)
_WRAPPING = re.compile(r"[()\[\]{}$\"'“”‘’`.。]|\\(?:text|mathrm)\s*\{")
_NUMBERED = re.compile(r"(?m)^\s*\d{1,2}[.)]\s+")
_PAIR_SIGN = (
    r"\s*[)\]）.》”\"]?\s*(?:-+>?|=+>?|–|—|→|⇒|:|~|\\(?:to|rightarrow)(?![A-Za-z])|↔|对应|配|(?i:matches|(?:goes"
    r"|pairs|matched|is matched|corresponds) (?:with|to)|belongs to|with|is|to)(?![A-Za-z])|是)?"
    r"\s*[(\[（《“\"]?\s*(?:(?i:an?|the) )?"
)


def parse_sequence(answer: Any) -> list[str]:
    """The labels of a reference: a list, `B, A, C`, `②①③` or `BAC`. Raises RewardError for less than two."""
    labels = [str(each) for each in answer] if isinstance(answer, list | tuple) else _labels_of(fold_text(str(answer)))
    labels = [_label(each) for each in labels]
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise RewardError(f"its answer {answer!r:.80} is no order; give two or more different labels, as in [B, A, C]")
    return labels


def extract_order(found: FinalAnswer, gold: Sequence[str], options: Mapping[str, str]) -> list[str] | None:
    """The labels of `gold` in the order of the answer; None where it is no arrangement of all of them.

    The texts of the options stand for their letters.
    """
    names = {_label(letter): letter for letter in gold} | {
        comparison_key(options[name]): name for name in gold if name in options
    }
    for each in (found.text, _NUMBERED.sub("", found.tail)):
        text = re.sub(r"[^\S\n]+", " ", each)
        for pieces in (_ARROW.split(text.strip()), _labels_of(text)):
            said = [piece for piece in pieces if piece.strip(" .。")]
            if len(said) != len(gold):
                continue
            labels = [names.get(_label(piece)) or names.get(comparison_key(piece)) for piece in said]
            if sorted(label or "" for label in labels) == sorted(gold):
                return [label for label in labels if label]
    return None


def kendall_tau(gold: Sequence[str], answer: Sequence[str]) -> float:
    """Kendall's tau of two orders of the same labels: 1 minus twice the share of pairs that are the wrong way round."""
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
    """The pairs of a reference: a mapping, a list of pairs, or `1-A, 2-C`. Raises RewardError where it is none."""
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
        raise RewardError(f"its answer {answer!r:.80} has no pairs; give a mapping such as {{1: B, 2: A}}")
    return {_label(left): _label(right) for left, right in found.items()}


def extract_pairs(found: FinalAnswer, gold: Mapping[str, str]) -> dict[str, str]:
    """The pairs that an answer makes, left to right, as far as they stand.

    A left side that is given two right ones has none; so has every left side whose right one is used more often than in
    the reference, because everything is matched with everything otherwise.
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
    """All pairs of a text, in either direction."""
    one, other = _any_of(gold), _any_of([*gold.values(), *"ABCDEFGHIJ"])
    for sign in (_PAIR_SIGN, r"\s*,\s*"):
        forth = re.findall(rf"{one}{sign}{other}", text, re.IGNORECASE)
        back = [] if forth else re.findall(rf"{other}{sign}{one}", text, re.IGNORECASE)
        if forth or back:
            return [(_label(left), _label(right)) for left, right in forth or [each[::-1] for each in back]]
    return []


def _any_of(labels: Iterable[str]) -> str:
    """A group that finds any of the labels, a number also in its circle, none inside a longer one."""
    forms = {form for label in labels for form in (label, *_circled(label))}
    longest_first = "|".join(_bounded(form) for form in sorted(forms, key=len, reverse=True))
    return f"({longest_first})"


def _bounded(form: str) -> str:
    if form.isdigit():
        return rf"(?<![\d.]){form}(?!\.?\d)"
    return rf"(?<![A-Za-z]){re.escape(form)}(?![A-Za-z])" if form.isascii() else re.escape(form)


def _circled(label: str) -> tuple[str, ...]:
    return (chr(ord("①") + int(label) - 1),) if label.isdigit() and 1 <= int(label) <= 20 else ()
