"""Parses the verdict of a judge's reply strictly: the last JSON object, its key and its range; without JSON, its words.

A verdict in words ("Score: 8/10", "[[A]]") counts only if the reply gives a single one without doubts, and no text that
the judge was shown has one in the same form: it may only repeat that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Any, Literal

import regex

from rollmill.types import split_reasoning
from rollmill_grading.candidates import find_boxes
from rollmill_grading.hedging import find_replacement, is_denied, is_disbelieved, is_hedged, is_retracted
from rollmill_grading.normalization import to_half_width
from rollmill_grading.phrase import strip_markup
from rollmill_grading.segmentation import SegmentedText

_LONGEST, _MOST_OBJECTS = 65_536, 400
_OBJECT = re.compile(r'\{(?=\s*+["}])')
_LONGEST_WORDS = 8000
_MORE = re.compile(r"[\s*_]*(?:-|–|~|/|%|to\b|or\b|and\b|(?:out )?of\b)[\s*_]*\d|[\s*_]*%", re.IGNORECASE)
"""The rest of a range, a fraction or a share, which is no score."""


def last_json_object(text: str) -> dict[str, Any] | None:
    """Return the last outermost JSON object of a reply; empty if it has a duplicate key, None without one.

    Reasoning is ignored. Of a long reply only the end is read.
    """
    text = split_reasoning(text).content[-_LONGEST:]
    starts = [match.start() for match in _OBJECT.finditer(text)]  # not the braces of formulas
    if len(starts) > _MOST_OBJECTS:
        return None
    found: dict[str, Any] | None = None
    end = 0
    for start in starts:
        if start >= end:
            with suppress(json.JSONDecodeError, RecursionError):
                found, end = _DECODER.raw_decode(text, start)
    return found


def parse_score(text: str, key: str, scale: tuple[float, float], shown: Sequence[str] | None = None) -> float | None:
    """Return the score of a reply, from 0 to 1; None if it has none, or one outside of the scale.

    `shown` are the texts in the prompt; with them, a reply without JSON may give its score in words.
    """
    found = last_json_object(text)
    low, high = scale
    value = (found or {}).get(key)
    if found is None and shown is not None:
        value = _score_in_words(_stated_verdict(text, key, shown, _SCORE), high)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return (value - low) / (high - low) if low <= value <= high else None


def parse_winner(text: str, key: str, shown: Sequence[str] | None = None) -> float | None:
    """Return 1 if the reply prefers A, 0 for B, 0.5 for a tie; None for anything else. `shown`: as for a score."""
    found = last_json_object(text)
    value = (found or {}).get(key)
    if found is None and shown is not None:
        value = (_stated_verdict(text, key, shown, _WINNER) or "").rpartition(" ")[2]
        value = "tie" if value.casefold() == "tie" else value
    return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(value) if isinstance(value, str) else None


def parse_ranking(text: str, key: str, count: int) -> list[int] | None:
    """Return positions (from 0) of all candidates, best first. None if one is missing, duplicate or unknown."""
    value = (last_json_object(text) or {}).get(key)
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        return None
    return [each - 1 for each in value] if sorted(value) == list(range(1, count + 1)) else None


# Verdicts in words.

_VALUE = r"[\s*_:`]*(?P<value>[^\s*_:`.,;!?()][^\s,;!?()]*(?: ?(?:/|out of|of) ?\d+)?(?: [AB]\b)?)"
_IS = r"\b[\s*_]*(?:(?:for|of) (?:the|this) (?:response|answer) )?(?:is\b|[:=]|would be\b)"
_GIVEN = r"\b(?:rate|give|score|grade) (?:it|this|the|this response|the response|this answer|the answer)(?: an?)?\b"
_BRACKETED = r"\[\[(?P<bracketed>[^\[\]\n]{1,20})\]\]"
_SCORE = re.compile(
    rf"(?:(?P<final>\b(?:final|overall|total) )?\b(?:score|rating|grade|verdict){_IS}|{_GIVEN}"
    rf"|(?:最终|总)?(?:评分|得分|打分)[是为:]){_VALUE}|{_BRACKETED}",
    re.IGNORECASE,
)
_WINNER = re.compile(
    rf"(?P<final>\b(?:final|overall) )?\b(?:verdict|winner|decision|choice|judge?ment|(?:better|preferred|best) "
    rf"(?:response|answer|one)){_IS}[\s*_:`]*(?P<value>\[\[[AB]\]\]|\\boxed\{{[AB]\}}|(?:a )?tie\b"
    rf"|(?:(?:response|assistant|answer) )?[AB]\b(?! tie))|{_BRACKETED}",
    re.IGNORECASE,
)
_AMOUNT = re.compile(
    r"(?P<number>-?\d{1,9}(?:\.\d{1,9})?)(?: ?(?:/|out of|of) ?(?P<most>\d{1,9}))?(?: ?(?:points?|分))?"
)
_ASPECT = re.compile(
    r"\b(?!(?:my|the|an?|its|this|response|so|thus|hence|therefore|i|we|would|d)\b)[a-z]+[\s*_]+$", re.IGNORECASE
)
"""Words that make a score that of one aspect, as in `accuracy score`."""
_ALPHABETS = regex.compile(r"\p{Latin}(?=[\p{Cyrillic}\p{Greek}])|[\p{Cyrillic}\p{Greek}](?=\p{Latin})|\p{Cherokee}")
"""Words of two alphabets, which a judge may repeat in one."""


def _stated_verdict(text: str, key: str, shown: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """Return the only verdict in words of a reply: after "Score:" and the like, in [[ ]], or a box at the end."""
    texts = [to_half_width(each) for each in (*shown, "".join(shown))]
    if "_" in key or any(_ALPHABETS.search(each) or pattern.search(each) for each in texts):
        return None
    text = to_half_width(split_reasoning(text).content[-_LONGEST_WORDS:]).strip()
    passage = SegmentedText(text)
    found = list(pattern.finditer(text))
    final = [each for each in found if each["final"]]
    verdicts = []
    for each in final or found:
        value = strip_markup(_unboxed(each["value"] or each["bracketed"])).strip("[]")
        start = max(text.rfind(mark, 0, each.start()) for mark in ("\n", ". ", "! ")) + 1
        before, behind = text[start : each.start()], text[each.end() :]
        end = passage.sentence_end(each.end())
        is_question = text[end : end + 1] == "?"
        if _ASPECT.search(before) or is_denied(before, value, is_question=is_question) or is_disbelieved(before):
            return None
        doubted = is_retracted(behind) or is_hedged(value, behind) or find_replacement(value, behind) is not None
        if doubted or _MORE.match(behind):
            return None
        verdicts.append(value)
    boxes = find_boxes(text) or [] if not any("\\boxed" in each for each in texts) else []
    if not found and boxes and not text[boxes[-1].end :].strip(" $.*\\)]\n"):
        verdicts = [box.text for box in boxes]
    return verdicts[0] if len(set(verdicts)) == 1 else None


def _unboxed(value: str) -> str:
    boxes = find_boxes(value) or []
    return boxes[0].text if boxes else value


def _score_in_words(value: str | None, most: float) -> float | None:
    """Return the number of `8`, `8/10` or `8 out of 10`; None if its maximum is not that of the scale."""
    found = None if value is None else _AMOUNT.fullmatch(value)
    if found is None or (found["most"] is not None and float(found["most"]) != most):
        return None
    return float(found["number"])


def combine_votes(scores: Sequence[float], how: Literal["mean", "median", "majority"]) -> float:
    """Combine several votes into one number."""
    if how == "mean":
        return fmean(scores)
    if how == "median":
        return float(median(scores))
    counts = Counter(scores)
    most = max(counts.values())
    return fmean(score for score, count in counts.items() if count == most)


def verdict_schema(key: str, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema of thoughts, then the verdict."""
    return {
        "type": "object",
        "properties": {"thoughts": {"type": "string"}, key: verdict},
        "required": ["thoughts", key],
        "additionalProperties": False,
    }


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else {}


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_int=_integer)
