"""Finds candidates for the final answer in a completion, and their evidence. Linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollmill_grading.hedging import (
    NEGATION,
    OTHER_ANSWER,
    POSSIBILITY,
    find_correction,
    find_replacement,
    is_denied,
    is_disbelieved,
    is_only_possible,
    is_retracted,
)
from rollmill_grading.normalization import CJK
from rollmill_grading.phrase import extract_value, has_conclusion, has_value, strip_markup
from rollmill_grading.segmentation import SegmentedText

AnswerKind = Literal["boxed", "hash", "said", "corrected", "bare", "bold", "sentence", "line"]
"""A box; `#### 12`; after words such as "the answer is"; after "it should be"; the whole text; a bold or code value;
the last sentence that concludes something; the last line.
"""


@dataclass(frozen=True, slots=True)
class AnswerCandidate:
    """A piece of text that may be the answer, as written, at `start` to `end` of the completion."""

    kind: AnswerKind
    text: str
    start: int
    end: int


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*")
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$]+)|\\boxed([A-Za-z0-9])(?![A-Za-z])")

_NOUN = (
    r"(?:answer|solution|result|option|choice|statement|value|graph|equation|expression|number|total|order|sequence"
    r"|probability|sum|response|letter|match|pairs?|blank)s?"
)
_VERB = (
    r"(?:is|are|was|were|equals|becomes|(?:should|must|would|will|could|might|may|has to|can only|turns out to"
    r"|comes out to)(?: therefore)?(?: be)?)\b"
)
_SAID = re.compile(
    # How all of what follows begins, first by its first character: it fails fast elsewhere.
    r"(?=[abcdfioprsvwz\[答最所因结得正符满故应选排顺])"
    r"(?=\b(?:a(?:ns|ppro)|best|co(?:n|rr)|des|final|i\b|order|points|r(?:eq|esul|ight|oots)|s(?:equ|olu)|val|we\b|zeros)"
    r"|[\[答最所因结得正符满故应选排顺])"
    r"(?:\banswers?\b(?!\s+(?:choices?|options?|keys?|sheets?|format))(?:\s+\((?:in|to)[^()\n]{1,40}\))?"
    rf"(?:\s*[*_]*\s*(?:[:=]+>?|[-–—]>?\s|→)|[\s*,_]+(?:(?!is\b|are\b)[A-Za-z'’-]+[\s,]+"
    rf"|\$[^$\n]{{1,30}}\$\s+){{0,9}}?{_VERB}\s*:?|[ \t*_]*\n)"
    rf"|\b(?:correct|right|best|final|desired|required|appropriate)\s+(?:[a-z]+\s+)?{_NOUN}\s*(?:{_VERB}\s*:?|[*_]*:)+"
    r"|\b(?:ans|result|final result|final value|conclusion)\s*[*_]*\s*[:=]"
    r"|\b(?:order|sequence)\s*(?:is|:)+"
    r"|\b(?:solutions?|roots|zeros|values|points)(?: [^.:\n]{1,40})? (?:are|is)(?: (?:therefore|thus|as follows))?"
    r"\s*[*_]*:[*_]*(?=\s*\n\s*[-*•] )"
    r"|\b(?:I|we)(?:'d| would| will)?\s+(?:choose|pick|select|answer|go with|conclude(?: that)?)\b"
    r"|\[(?:答案|answer)\]\s*:?"
    r"|答案(?:应该|应|就|为|是|选|等于|便|即){0,3}(?:(?<=[是为选即])\s*:?|\s*:)|(?:最终|所以|因此|最后)?(?:结果|得数)(?:应该|应|就)?(?:是|为|等于)\s*:?"
    r"|正确的?(?:选项|顺序|说法|排序|答案|图象|图像|结论)?\s*(?:应该|应)?\s*(?:是|为|有|:)+|(?:符合|满足)[^,。;\n]{0,16}的(?:选项|说法)?(?:是|为|有)"
    r"|(?:[故应]|所以|因此)\s*选(?:择|项)?\s*(?:是|为|:)*"
    r"|(?<![备可挑精])选(?:择|项)?\s*(?:是|为|:)*\s*(?=[(\[]?[A-J]{1,10}(?![A-Za-z]))"
    r"|(?<![解问回])答\s*:|(?:[故应]|所以|因此|应该)填\s*[:是为]?\s*(?=\S)|(?:排序|顺序|排列)(?:应该?)?(?:依次)?(?:(?:是|为)?\s*:|(?:是|为)(?=\s*[A-J①-⑳])))",
    re.IGNORECASE,
)
_UNSAID = re.compile(
    r"[\s*:]*(?:obtained|found|given(?! by [\d$\\])|derived|calculated|computed|determined|as follows|shown"
    r"|based|because|correct\b|right\b"
    r"|wrong\b|incorrect\b|all correct|both correct|all right|in the form|not affected|reached|verified"
    r"|consistent|reasonable|clear\b|explained"
    r"|below|above|required|needed|expected to|supposed to|rounded(?! is)|expressed|written|supported|unique"
    r"|正确的?[。,]|错误的?[。,]|如下|合理|唯一)",
    re.IGNORECASE,
)
_WORKING = re.compile(
    r"(?:to (?:find|solve|determine|answer|get|calculate|simplify|evaluate|compute|figure)|first\b|let\b"
    r"|let's|let’s|we (?:are|know|have|need|can|start|first|will)|start"
    r"|step\b|since\b|because\b|here'?s?\b|for (?:this|the)\b|using\b|consider\b|recall\b|given\b|note\b"
    r"|in this\b|解[:：]?|首先|设|由|根据|因为|已知|分析)",
    re.IGNORECASE,
)
_SKIP = re.compile(r"(?:[\s*:：_>#\"“‘]|(?<=\n)[-–•](?=\s)|\\(?:quad|,|;| |text\{\s*\}))*")
_BULLET = re.compile(r"\n\s*[-*•] +")
_LIST_OF_ANSWERS = re.compile(r"[ \t*_]*(?:\n\s*[-*•] +[^\n]{1,60}){2,12}(?=\s*\Z|\n\s*\n)")
"""A list with a mark before each item, which ends its paragraph."""
_CONCLUDES = re.compile(
    r"\b(?:therefore|thus|hence|so|consequently|in conclusion|finally|in total|altogether|overall"
    r"|this (?:means|gives|shows)|which (?:means|gives)|we (?:get|find|obtain|have))\b"
    r"|所以|因此|故|综上|一共|总共|得出|可得|∴|\\therefore",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"[\s*#>_(-]*(?:(?:let's |let us |to |we can |you can |now,? )?(?:double-?)?(?:check|verif\w+"
    r"|confirm)\w*\b|i hope|hope (?:this|that)|let me know|feel free"
    r"|if you(?:'d| would| have| need| want)|please|note(?: that)?\b"
    r"|this (?:makes sense|matches|is consistent|agrees|confirms)"
    r"|which (?!leaves|gives|means|leads|yields|makes|is\b|equals)|where\b|as (?:required|desired|expected"
    r"|claimed)|as a check|sanity check|for example|e\.g|explanation|reason\w*\b|why\b|source|reference"
    r"|do you|would you|is there|does (?:this|that|it) make sense|indeed\b|great|good luck|remember|~|-[A-Za-z]"
    r"|(?:with(?:out)?|if|had)\b[^\n]{0,80}\bwould\b|(?<=\()[A-Z]\w* "
    r"|检验|验证|验算|注意?[:：]?|希望|如有|如果您|备注|解释|解析|理由)",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(
    r"(?:[=+/×÷·<]| \*|[\w)] ?[-−]|\b(?:to|the|of|and|is|are|a|an|by|with|for|that|be|have to))\s*$", re.IGNORECASE
)
"""The end of a text that was cut off."""
_TURNS = re.compile(
    r"[=\n]|\b(?:so|thus|hence|therefore|total\w*|altogether|but|however|wait|actually|no|answer)\b|所以|因此|故|共|但|不|答",
    re.IGNORECASE,
)
"""Signs that a value at the beginning of a text was not its answer."""
_TICKED = re.compile(r"[✓✔✗✘]")
_CHECKING = re.compile(r"[\s*#(]*(?:to |let|we |now|does |验|检|\w*-?check|verif)", re.IGNORECASE)
_MARKED = re.compile(
    r"\*\*(?P<bold>[^*\n]{1,200}?)\*\*|(?<!`)`(?P<code>[^`\n]{1,200})`(?!`)|__(?P<under>[^_\n]{1,200}?)__"
)
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!sqrt|pi|sin|cos|tan|log|ln|exp)[A-Za-z]{2,}")
_NEGATIVE = re.compile(
    r"(?:n't|\bnot|\bnever|不是|不为|不等于|没有|并非)"
    r"\s*(?:be |equal(?: to)? |exactly |(?:\w+ ){0,2}(?:at|through)(?: the)?(?: points?)? )?\s*$",
    re.IGNORECASE,
)
_LONGEST_LINE = 200
_MOST_SENTENCES = 12
_MOST_MARKS = 40


def find_boxes(text: str) -> list[AnswerCandidate] | None:
    r"""Return every outermost \boxed{} with balanced braces, in order; without one, `\boxed 5`.

    None if the last box is not closed: it replaces those before it, and the text was cut off inside it.
    """
    found: list[tuple[int, int]] = []
    open_braces: list[int] = []  # start of the box that a brace opens, -1 for other braces
    for token in _BRACES.finditer(text):
        if token[0] in ("\\\\", "\\{", "\\}"):
            continue
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, token.end()))
        else:
            open_braces.append(token.start() if len(token[0]) > 1 else -1)
    if found and max(open_braces, default=-1) >= found[-1][1]:
        return None
    if not found:
        return [AnswerCandidate("boxed", each[1] or each[2], *each.span()) for each in _UNBRACED.finditer(text)]
    return [
        AnswerCandidate("boxed", _OPENING.sub("", text[start:end])[1:-1].strip(), start, end) for start, end in found
    ]


def find_hash_answer(text: str) -> AnswerCandidate | None:
    """Return the text after the last "####" on its line."""
    mark = text.rfind("####")
    line = text[mark + 4 :].lstrip("# \t\n").partition("\n")[0].strip() if mark >= 0 else ""
    if not line:
        return None
    start = text.find(line, mark)
    return AnswerCandidate("hash", line, start, start + len(line))


def find_stated_answers(passage: SegmentedText) -> Iterator[AnswerCandidate]:
    """Find the text after each "the answer is" up to the end of its sentence, if that is a claim; and corrections. The
    last one comes first."""
    text = passage.text
    for mark in list(_SAID.finditer(text))[: -_MOST_MARKS - 1 : -1]:
        if (at := _SKIP.match(text, mark.end())) is None or at.end() >= len(text):
            continue
        start, end = at.end(), passage.sentence_end(at.end())
        phrase = text[start:end].strip()
        sentence = text[max(text.rfind("\n", 0, mark.start()), 0) : mark.start()]
        heading = mark[0].rstrip(" *_")[-1:] in ":=\n"
        if (
            not phrase
            or OTHER_ANSWER.search(sentence)
            or _UNSAID.match(text, mark.end())
            or (heading and _is_working(passage, phrase, end))
        ):
            continue
        if (bullets := _LIST_OF_ANSWERS.match(text, mark.end())) is not None:
            items = [item.strip(" .,;") for item in _BULLET.split(bullets[0])[1:]]
            yield AnswerCandidate("said", ", ".join(items), start, bullets.end())
            continue
        claim = text[mark.end() : end]
        if heading and re.match(r"[\s*]*neither\b", claim, re.IGNORECASE):
            claim = ""  # "neither ..." is the text of an option here
        opposed = mark[0].split()[0] if re.match(r"(?:correct|right)\b", mark[0], re.IGNORECASE) else ""
        if is_denied(sentence + opposed, claim, is_question=text[end : end + 1] in ("?", "？")):
            if NEGATION.match(text[mark.end() : end]) and (correction := _correction(passage, start, end)) is not None:
                yield correction
            continue
        yield AnswerCandidate("said", phrase, start, end)


def _is_working(passage: SegmentedText, phrase: str, end: int) -> bool:
    """True if a heading such as "Answer:" is followed by long working."""
    behind = passage.text[end:].strip()
    is_long = "\n" in behind and not has_value(phrase) and len(phrase) >= 60
    return len(behind) > 40 and (is_long or _WORKING.match(phrase) is not None)


def _correction(passage: SegmentedText, start: int, end: int) -> AnswerCandidate | None:
    at = find_correction(passage.text[start:])
    if at is None:
        return None
    begin = _SKIP.match(passage.text, start + at)
    place = start + at if begin is None else begin.end()
    stop = passage.sentence_end(place)
    phrase = passage.text[place:stop].strip()
    return AnswerCandidate("corrected", phrase, place, stop) if phrase else None


def apply_correction(passage: SegmentedText, candidate: AnswerCandidate, value: str) -> AnswerCandidate | None:
    """Return the replacement of a retracted candidate; the candidate itself if nothing retracts it.

    None if it is called wrong and nothing replaces it.
    """
    text = passage.text
    at = (
        text.find(value, candidate.start) + len(value)
        if value and value in text[candidate.start : candidate.end]
        else candidate.end
    )
    behind = text[at : at + 500]
    if is_retracted(behind):
        return _correction(passage, at, at)
    place = find_replacement(value, behind)
    return candidate if place is None else _correction(passage, at, at)


def find_bare_answer(text: str) -> AnswerCandidate | None:
    """Return the whole text if it is one short line without words."""
    line = re.sub(r"!{2,}$", "", text.strip())
    if (
        not 0 < len(line) <= 80
        or "\n" in line
        or _WORDS.search(re.sub(r"\\[A-Za-z]+", "", line))
        or re.search(f"[{CJK}]", line)
    ):
        return None
    return AnswerCandidate("bare", strip_markup(line), 0, len(text))


def find_concluding_sentence(passage: SegmentedText) -> AnswerCandidate | None:
    """Return the last sentence that names a value and is not a remark, check or denial; its bold value if it has one.

    A sentence with "so" or "therefore" takes precedence over a later one that checks it.
    """
    spans = passage.sentences()[-_MOST_SENTENCES:]
    text = passage.text
    if _UNFINISHED.search(text):
        return None
    if len(spans) > 1 and _is_bare(text[slice(*spans[0])]) and not _TURNS.search(text, spans[0][1]):
        spans = spans[:1]
    remarks = [index for index, (start, end) in enumerate(spans) if _REMARK.match(text[start:end])]
    checks = [
        index
        for index in remarks
        if index and has_value(text[slice(*spans[index - 1])]) and _CHECKING.match(text[slice(*spans[index])])
    ]
    if (
        checks
        and any(_CONCLUDES.search(text[start:end]) for start, end in spans[: checks[0]])
        and not any(_CONCLUDES.search(text[start:end]) for start, end in spans[checks[0] + 1 :])
    ):
        spans = spans[: checks[0]]
    first = spans[0][0] if spans else 0
    for start, end in [*_conclusive(text, spans), *reversed(spans)]:
        sentence = text[start:end]
        is_check = start > first and _TICKED.search(text[start : end + 3]) and has_value(text[first:start])
        if _REMARK.match(sentence) or text[end : end + 1] in ("?", "？") or is_check:
            continue
        marked = [each for each in _MARKED.finditer(sentence) if _is_value(each)]
        if marked:
            inner = next(group for group in marked[-1].groups() if group)
            return AnswerCandidate("bold", inner.strip(), start + marked[-1].start(), start + marked[-1].end())
        value = extract_value(sentence, leads=False)
        if not value or not has_value(value):
            continue
        marks = _SAID.finditer(sentence)
        if any(is_denied(sentence[: mark.start()], sentence[mark.end() :], is_question=False) for mark in marks):
            return None
        at = sentence.rfind(value)
        before = sentence[: max(at, 0)].rstrip(" $(\\") + " "
        if POSSIBILITY.search(before) or is_only_possible(sentence[max(at, 0) + len(value) :]):
            continue
        if (
            _NEGATIVE.search(before)
            or is_disbelieved(before)
            or is_retracted(sentence[at + len(value) :] + text[end : end + 100])
        ):
            return None
        return AnswerCandidate("sentence", sentence.strip(), start, end)
    return None


def _conclusive(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sentences with a value that is not just a time or place, the last one first."""
    return [span for span in reversed(spans) if has_conclusion(text[slice(*span)])]


def _is_bare(sentence: str) -> bool:
    """True if a sentence is only a value, as in `Three. Two of them are red.`"""
    plain = strip_markup(sentence)
    return 0 < len(plain) <= 30 and "=" not in plain and has_value(plain) and extract_value(plain, leads=True) == plain


def _is_value(marked: re.Match[str]) -> bool:
    inner = next(group for group in marked.groups() if group)
    value = extract_value(inner, leads=True)
    return has_value(inner) and len(value) >= len(strip_markup(inner)) - 2 and not inner.rstrip().endswith(":")


def find_last_line(text: str) -> AnswerCandidate | None:
    """Return a short text of one line as a whole, or the last line of a longer one."""
    line = text.strip().rpartition("\n")[2].strip()
    if not line:
        return None
    start = text.rfind(line)
    if "\n" in text.strip() or len(line) > _LONGEST_LINE:
        line = line.strip(" \t\r*:")[-_LONGEST_LINE:]
    return AnswerCandidate("line", line, start, start + len(line)) if line else None
