"""Which values of a sentence only say when, where or how: no answers where another value stands beside them."""

from __future__ import annotations

import re

from rollmill.rewards.answers.values import Value

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


def is_circumstance(text: str, group: Value) -> bool:
    """Whether a value only says when or where, as in "in 2019" or "for n = 4"."""
    before = max(0, group.start - 40)
    if "=" in text[group.start : group.end]:
        return False
    if _RESULTING.search(text, before, group.start) or text.startswith(("$$", "\\["), group.start):
        return False
    return _PREPOSITION.search(text, before, group.start) is not None
