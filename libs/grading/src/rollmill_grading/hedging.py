"""Detects doubts about a candidate in English and Chinese: negations, retractions, questions, conditions, hedges."""

from __future__ import annotations

import re

from rollmill_grading.normalization import CJK
from rollmill_grading.numerals import CHINESE_DIGITS

NEGATION = re.compile(
    r"(?:\s|[*:_])*(?:(?:is|are|be|was)\s+)?(?:(?:definitely|certainly|clearly|simply|probably|actually|just|likely) )?"
    r"(?:(?:not|never|neither|n't|nor)\b|不(?!等式|变|动|存在)|并非|没有?(?!错)|错误?的?$|(?:wrong|incorrect|unclear|unknown)\b)",
    re.IGNORECASE,
)
"""A denial directly after a marker, as in `the answer is not 12`."""
_DENIED_BEFORE = re.compile(
    r"(?:n't|\bnot|\bnever|\bcannot|\bhardly|\bdoubt|\bdisagree|\bfalse|\bwrong|\bincorrect|\bno way"
    r"|\bnot sure|\bunsure"
    r"|\bunlikely|不(?!难|妨|管|仅)|别|勿|没有|并非|未必|难道|错误地|误)"
    r"[^.!?;。；\n]{0,40}$",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"(?:\b(?:if|suppose|assume|assuming|whether|unless|imagine|(?:some|many|one|you|people"
    r"|students)(?: people)?"
    r" (?:may|might|could|would)?\s?(?:think|say|believe|argue|guess)|guess(?:ed)?(?: that| was)?"
    r"|thought(?: that| was)?"
    r"|claims?(?: that)?|initially|at first)\b|如果|假设|假如|若|是否|有人|误以为|以为)[^.!?;。；\n]{0,60}$",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:wrong|incorrect|not (?:correct|right|true|the (?:right |correct )?answer|valid|possible)"
    r"|(?:a )?mistaken?|invalid"
    r"|impossible)\b|错误?的?(?=[\s,，.。;；!！]|$)|不(?:正确|对|符合)|有误|搞错|算错"
)
_RETRACTED = re.compile(
    rf"[\s*$)\]}}_.,，。—–\-\"”'’`]*(?:(?:\(|（)?(?:but |however,? |hmm,? |oh,? )?(?:(?:this|that|it|which|the answer"
    rf"|这|那|这个答案|上述答案)\s*)?"
    rf"(?:(?:is|was|are|seems?|looks?|must be|would be|is clearly|isn't|是)\s*)?(?:{_WRONG})"
    r"|(?:no|oops|sorry|scratch that|(?:wait|actually|hmm|oh),? no"
    r"|never ?mind|i made (?:a|an) (?:mistake|error)|不对|不是的|等等,?不|抱歉"
    r"|更正)[,.!。:—])",
    re.IGNORECASE,
)
_OTHER = (
    r"(?=[\s*$:(`\"“'‘]*(?:\\\(|\\\[|\\boxed|\\frac|\\sqrt)?[\s{]*(?:the answer (?:is|could be) )?"
    rf"(?P<value>[-+]?\$?\\?[\d√π][^\s,;，；。!?]*|\(?[A-Z]\)?(?![A-Za-z'’])|\$[^$]+\$|\\\(.{{1,60}}?\\\)|[{CHINESE_DIGITS}]{{1,8}}(?![{CJK}]{{2}})"
    r"|(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty)\b))"
)
_HEDGED = re.compile(
    r"(?:\b(?:might|may|could|can|would)(?: also| even| well| equally| instead| alternatively| just as well"
    r"| possibly| maybe){0,3}"
    r" be(?: also)?|\bor (?:maybe|perhaps|possibly|even|alternatively|else|it(?:'s| is| could be| might be))"
    r"|\b(?:maybe|perhaps|possibly|alternatively),?(?: (?:it is|it's|the answer is))?|\bor(?: just)?"
    r"|(?P<beside>another|a second|an alternative|the other) (?:possible |valid )?(?:answer|option"
    r"|possibility|solution|value)"
    r"(?: (?:is|could be|would be|might be))?"
    r"|(?:也|还|又|亦)?(?:可能|也许|或许|或者|可以|说不定)(?:也|还)?(?:是|为|选)?|或者?是?|要么|也(?:是|选))"
    rf"{_OTHER}",
    re.IGNORECASE,
)
_CORRECTED = re.compile(
    r"(?:\b(?:should|must|ought to)(?: actually| really| instead| rather)? (?:have been|be)(?: actually)?"
    r"|\b(?:actually|rather|instead|correction|i meant?|make (?:it|that)|i mean)[,:]?(?: (?:it is|it's"
    r"|it should be|the answer is|is))?"
    r"|\bbut(?: rather| actually)?(?: (?:it is|it's|is))?|\bit(?:'s| is)|\bno[,:]?(?: wait[,:]?)?(?: (?:it is|it's))"
    r"|\b(?:wait|actually|hmm|oh),? no[,:.]?(?: (?:it is|it's|the answer is))?"
    r"|应(?:该|当)?(?:是|为)|而是|更正为|改为|其实是|实际上是)"
    rf"{_OTHER}",
    re.IGNORECASE,
)
_DISBELIEVED = re.compile(
    r"(?:n't|\bnot|\bnever|\bcannot|\bhardly|\bdoubt)\s+(?:\w+ )?(?:think|believe|say|sure|certain|claim|mean"
    r"|that|(?:the case|true) that)\b|\bnot (?:convinced|the case)\b|\bno (?:way|chance)\b(?! (?:to|of)\b)"
    r"|\bdoubt that\b|不认为|不觉得|不(?:是)?说",
    re.IGNORECASE,
)
OTHER_ANSWER = re.compile(
    r"\b(?:another|other|alternative|alternate|second|also)(?: (?:possible|valid|plausible|good))?\s*$", re.IGNORECASE
)
"""Words that make the answer named next an additional one."""
_REPORTED = re.compile(
    r"\b(?:whether|unless|imagine|guess(?:ed)? (?:that|was)|thought (?:that|was)|claims?(?: that)?"
    r"|initially thought|at first)\b"
    r"|如果|假设|假如|是否|有人|以为",
    re.IGNORECASE,
)
POSSIBILITY = re.compile(
    r"(?:\b(?:might|may|could)(?: \w+){0,2} be|\bor (?:maybe|perhaps|possibly)|也?可能(?:也|还)?是|或许是|也许是)\s*$",
    re.IGNORECASE,
)
"""Words that make the value after them a second guess."""
_POSSIBLE = (
    r"(?:is|are|was|would be|could be|might be|may be|seems?|works?|fits?)(?: also| equally| still| just as)?"
    r"(?: (?:possible|plausible|correct|valid|right|acceptable|fine|ok))?(?: too| as well|(?<=possible)"
    r"|(?<=plausible))|也(?:可以|行|对|有可能|正确)"
)
_IS_POSSIBLE = re.compile(rf"[\s*$)}}\]\\]*(?:{_POSSIBLE})", re.IGNORECASE)
_CORRECTING = re.compile(
    r"[^\d\n]{0,60}?(?:\b(?:should|must)(?: actually| really| instead)? (?:have been|be)\b"
    r"|\b(?:actually|wait),? (?:it is|it's)\b|\bcorrection\b"
    r"|\bmake (?:it|that)\b|\bi meant?\b|更正为|应(?:该|当)?(?:是|为)|改为|其实是|实际上是)",
    re.IGNORECASE,
)
_RIGHT_ONE = re.compile(r"(?:\b(?:correct|right|actual|true)|(?:正确|真正|实际)的?)\s*$", re.IGNORECASE)
"""Words that oppose the answer named next to a wrong one in an earlier clause."""
_CLAUSES = re.compile(r"[.!?;:。；！？：\n]")
_IS_LETTER = re.compile(r"[A-Ja-j]|")
_BEHIND = 400
"""Characters after a candidate that are searched for doubts."""


def is_denied(before: str, tail: str, *, is_question: bool) -> bool:
    """True if a candidate is not a claim.

    Args:
        before: the text before it, or before its marker, in its sentence.
        tail: the text after its marker.
        is_question: its sentence is a question.
    """
    clause = _CLAUSES.split(before[-120:])[-1]
    opposed = re.split("[,，]", clause)[-1] if _RIGHT_ONE.search(clause) else clause
    return (
        is_question
        or NEGATION.match(tail) is not None
        or _DENIED_BEFORE.search(opposed) is not None
        or _SUPPOSED.search(clause) is not None
    )


def is_disbelieved(before: str) -> bool:
    """True if the words before a value in its sentence deny it or attribute it to others: `I don't think it is 12`."""
    return _DISBELIEVED.search(before) is not None or _REPORTED.search(re.split("[,，]", before)[-1]) is not None


def is_only_possible(behind: str) -> bool:
    """True if a value is only called possible, as in `though 10 is possible too`."""
    return _IS_POSSIBLE.match(behind) is not None


def find_replacement(answer: str, behind: str) -> int | None:
    """Return the position of a value that replaces an answer, as in `12. Hmm, actually it should be 13`; else None."""
    found = _CORRECTING.match(behind[:_BEHIND])
    other = None if found is None else re.compile(_OTHER, re.IGNORECASE).match(behind, found.end())
    return None if other is None or _plain(other["value"]) in _plain(answer) else other.start()


def is_retracted(behind: str) -> bool:
    """True if the text after a candidate calls it wrong, as in `12 is wrong`."""
    return _RETRACTED.match(behind[:_BEHIND]) is not None


def find_correction(behind: str) -> int | None:
    """Return the position of a value that corrects a candidate, as in `12, no: it should be 13`; None without one."""
    found = _CORRECTED.search(behind[:_BEHIND])
    return None if found is None else found.end()


def is_hedged(answer: str, behind: str) -> bool:
    """True if the text after an answer offers another one, as in `9. But it might also be 10`."""
    plain, behind = _plain(answer), behind[:_BEHIND]
    return any(
        _plain(found["value"]) not in plain
        and (found["beside"] or _is_letter(plain) == _is_letter(_plain(found["value"])))
        and not _DENIED_BEFORE.search(behind, 0, found.start())
        for found in _HEDGED.finditer(behind)
    )


def _is_letter(plain: str) -> bool:
    return _IS_LETTER.fullmatch(plain) is not None


def _plain(text: str) -> str:
    return re.sub(r"[\s$*`\\(){}.]|boxed", "", text)
