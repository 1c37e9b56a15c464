"""True or false, in the words and signs of both languages."""

from __future__ import annotations

import re

_TRUE = frozenset(
    [
        *("true", "t", "yes", "y", "correct", "right", "对", "对的", "正确", "正确的", "是", "是的"),
        *("对了", "没错", "是对的", "是正确的", "真", "√", "✓", "✔", "☑", "✅", "\\checkmark", "\\surd"),
    ]
)
_FALSE = frozenset(
    [
        *("false", "f", "no", "n", "incorrect", "wrong", "untrue", "错", "错的", "错误", "错误的", "否"),
        *("不是", "不对", "不正确", "是错的", "是错误的", "错了", "假", "×", "✗", "✘", "✕", "❌", "x", "\\times"),
    ]
)
_NEGATION = (
    r"(?:(?:\bnot|n't|\bnever|\bhardly)\s+(?:(?:think|believe|say|the case)\s+)?(?:that\s+)?(?:[\w']+\s+){0,3}"
    r"|(?:不|没有|没|并非|不是|并不|并没有|非)\s*(?:是|完全|一定|都)?\s*)"
)
_WORD = re.compile(
    rf"(?P<not>{_NEGATION})?(?P<word>\b(?:true|false|correct|incorrect|right|wrong|untrue)\b|正确|错误"
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
    """What a text says of a statement: True, False, or None where it says neither or both.

    `text` is folded. Its first clause decides, unless the whole hedges between the two.
    """
    if text.rstrip(" .").endswith(("?", "吗")):
        return None
    said = _of_clause(text)
    if said is not None:
        return said
    clause = _CLAUSE_END.split(text, maxsplit=1)[0]
    said = _of_clause(clause)
    if said is None or (_HEDGE.search(text) and _polarities(text) == {True, False}):
        return None
    rest = text[len(clause) :].strip(" ,;:.-—。\n")
    return None if _of_word(rest) is (not said) else said


def _of_clause(clause: str) -> bool | None:
    found = _of_word(clause)
    if found is not None or _HEDGE.search(clause):
        return found
    said = _polarities(clause)
    return said.pop() if len(said) == 1 else None


def _of_word(text: str) -> bool | None:
    word = text.strip(" \t.,;:。!()[]{}$\"'“”‘’`").lower()
    word = re.sub(r"^\\text\s*\{(.*)$", r"\1", word).strip()
    return True if word in _TRUE else False if word in _FALSE else None


def _polarities(text: str) -> set[bool]:
    """What every word of truth in it says, "not" taken in."""
    return {(_of_word(found["word"]) is True) != bool(found["not"]) for found in _WORD.finditer(text)}
