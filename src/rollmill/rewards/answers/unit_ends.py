"""Where the unit behind a value ends: ` square feet per second`, `个苹果`."""

from __future__ import annotations

import re

from rollmill.rewards.answers.normalization import CJK

_NO_UNITS = """
in on of at to for left remaining that which who when where while if because since as and or but so with by from
than then more fewer less greater larger smaller each total altogether overall is are was were be after before
during between the a an this these those today now they he she it we i you using such only instead out away per_ not
also respectively until every together combined again here there has have had does do did can could will would
should may might must get gets got cost costs need needs show shows make buy sell sold walked bought eat earn earns
take takes pay pays gives give weigh weighs yields remains remain satisfies satisfy holds hold matches follows
sitting standing visible exactly about approximately possible works apiece equals equal makes given
"""
_STOP = frozenset(_NO_UNITS.split())
"""Words that are no units though they stand behind numbers."""
_UNIT = re.compile(
    rf"\s?(?:\\?%|°[CF]?|[€£¥])|[\s-]?(?P<word>[A-Za-zµΩ]+(?:[-/][A-Za-z]+)*\.?)(?:\^\{{?-?\d\}}?|[²³]|(?<=m)\d(?!\d))?"
    rf"|\s?[/每]?(?P<chinese>(?![是的和与或即且没不就才都也还在了吗呢吧共可能那而但所因只有到至又零])[{CJK}])"
)
_MOST = 5
_NAMED = re.compile(r"\$?[A-Za-z](?:_\w)?\s*=\s*[-+]?[\d.,/]+\$?")


def find_unit_end(text: str, start: int, end: int) -> int:
    """Where the unit behind a value ends, such as ` square feet per second` or `个苹果`.

    Of equations only those of a name and a number have one, as in `v = 18 km/h`.
    """
    run = text[start:end]
    is_relation = re.search(r"[A-Za-z]\)?\s*[=<>]|\\\{|[<>]", run) is not None and _NAMED.fullmatch(run) is None
    for _ in range(0 if is_relation else _MOST):
        found = _UNIT.match(text, end)
        if found is None or found.end() == end:
            break
        word = found["word"]
        if word is not None and (word.lower().rstrip(".") in _STOP or (len(word) == 1 and text[end] != " ")):
            break
        if word is not None and text[end : end + 1] == "-" and len(word) > 12:
            break
        end = found.end()
    return end
