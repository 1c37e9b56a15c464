"""Finds the options that an answer selects, by letter or by text."""

from __future__ import annotations

import re
from collections.abc import Collection

from rollmill_grading.comparison import compare_texts
from rollmill_grading.extraction import FinalAnswer
from rollmill_grading.normalization import comparison_key, fold_text

_LEAD = (
    r"(?>(?:(?:the|correct|right|options?|choices?|letters?|answers?|is|are|both|all|probably|likely|clearly|definitely"
    r"|of|(?i:so|thus|hence|therefore|it is|it's|i think|i believe|i'd go with|i would go with|my choice|option))"
    r"(?![A-Za-z])"
    r"|选项?|应?选|是|为|应该|故|综上|因此|所以)[ :,]*+)*+"
)
_ANY = r"[(\[{\"'“‘]*+[A-Z][)\]}\"'”’.]*+"
_AND = r"(?> ?(?:, ?and\b|[,;、&+]|and\b|和|与|及|以及) ?| )?+"
_LIST = rf"{_ANY}(?:{_AND}{_ANY})*+"
_BEHIND = (
    r" ?(?:(?:are|is) ?)?(?:选项|[两三四]?[项个]|都|均|both|all)? ?是? ?"
    r"(?:correct|right|true|正确|对)? ?的?[.。!]? ?[✓✔√✅]?"
)
_LETTERS = re.compile(rf"{_LEAD}({_LIST}){_BEHIND}")
_MARKED = re.compile(rf"({_LEAD})(\([a-j]\)|[a-j][).:](?= ))")
_SMALL = re.compile(r"\(?[a-j]\)?\.?|\(?[a-j]\)?(?:\s*[,;、]\s*\(?[a-j]\)?)+\.?")
_LED = re.compile(
    rf"{_LEAD}(?P<open>[(\[])?(?P<letter>[A-Z])(?![A-Za-z'\d^_])(?P<mark>[)\].:,、]*+) ?(?P<rest>.*)", re.DOTALL
)
_REASON = re.compile(r"\b(?:because|since|as|not|rather than|instead of)\b|因为|由于|而不是|不是|不选", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:because|since|as|is|are|for|due|not|here)\b|[,-]|\Z")
_DENIED = re.compile(
    r"\W*(?:选项|项)?(?:是)?\s?"
    r"(?:(?:is|are|was)(?:n't| not| wrong| incorrect| false| eliminated| ruled)|错|不|wrong|incorrect)",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"(?P<before>(?:\bor|\band|[,;/、或和及])\s?[(\[]?)?"
    r"(?<![A-Za-z'\\])(?P<letter>[A-J])(?![A-Za-z'\d^_])(?P<article>(?<=A) [a-z])?"
)
_RIGHT = (
    r"(?:the )?(?:correct|right|true)(?: answer| one| option| choice)?(?![A-Za-z])|the answer"
    r"|正确|对(?!于|应)|符合|满足|成立|works|fits"
)
_WRONG = (
    r"(?:not|n't) (?:be )?(?:the )?(?:correct|right|true|answer)|incorrect|wrong|false|eliminated|ruled out|invalid"
    r"|不(?:正确|对|符合|满足|成立|选)|错误?|排除|does(?:n't| not) (?:work|fit)"
)
_STATED = re.compile(
    rf"(?<![A-Za-z])(?P<list>{_LIST}) ?(?>(?:选项|项|说法|都|均|也|才|是|为|are|is|can be|must be|was|both|all|option"
    rf"|clearly|therefore|only)"
    rf"(?![A-Za-z]) ?)*+(?:(?P<wrong>(?i:{_WRONG}))|(?P<right>(?i:{_RIGHT})))(?!吗| ?\?)"
)
_JUDGED_LINE = re.compile(
    rf"^\s*[(\[]?(?P<list>[A-J])[)\].、:]+"
    rf" ?(?P<text>(?:(?!(?<![A-Za-z])[A-J](?![A-Za-z]))[^\n]){{1,200}}?)[,;:—-]? ?(?:(?P<wrong>{_WRONG})"
    rf"|(?P<right>{_RIGHT}))[。.;!]?\s*$",
    re.MULTILINE,
)
_CONCLUDED = re.compile(
    rf"(?:(?i:therefore|thus|hence|so|consequently|leaving)|所以|因此|故|综上)[ ,:]*{_LEAD}(?P<list>{_LIST}){_BEHIND}$"
)
_ONLY = re.compile(
    rf"(?:只有|仅|仅有|(?i:only)) ?(?:(?i:option|choice|statements?) |选项)?(?P<list>{_LIST})(?![A-Za-z])"
)
_BUT_NOT = re.compile(
    r",? ?(?:(?:but|and) )?(?:not|neither|rather than|instead of)\b ?(?:(?:options?|the) )?"
    rf"(?={_ANY}).*$|,? ?(?:而)?(?:不是|不选|非) ?(?={_ANY}).*$",
    re.DOTALL,
)
_WITH_TEXT = re.compile(r"(?<![A-Za-z])([A-J]) ?\(([^()\n]{1,200})\)")
_EITHER = rf"{_ANY}(?:(?: ?,? ?(?:and|or|nor)\b| ?[;、&]| ?,(?! ?[A-Z]、)|和|与|及|或) ?{_ANY})*+"
"""A list of options; a comma before one with 、 separates clauses."""
_ELIMINATED = re.compile(
    rf"(?:(?i:eliminat\w+|(?:rul|cross)\w* out|exclud\w+|reject\w*|discard\w*|\bnot|n't|neither|nor)|排除|除去)"
    rf"(?: (?i:be|options?|choices?|either)| ?选项)*+ ?(?P<after>{_EITHER})(?![A-Za-z'])"
    rf"|(?<![A-Za-z'])(?P<before>{_EITHER})(?![A-Za-z']) ?"
    r"(?>(?:(?:选项|都|均|也|全|是)|(?i:is|are|was|were|can|be|all|both|each|also|clearly|therefore|must)(?![A-Za-z])"
    r") ?)*+"
    rf"(?:{_WRONG}|(?i:contradict|fail|cannot|can't|do(?:es)?(?: not|n't)))"
)
"""A clause that calls options wrong, or rules them out."""
_EXCEPT = re.compile(
    rf"{_LEAD}(?:(?i:every ?(?:thing|one|option|choice|statement)"
    rf"|all(?: of)?(?: (?:the|them|options|choices|statements))*)(?: (?i:is|are) (?i:correct|right|true))?"
    rf" ?,? ?(?i:except|but|apart from|other than)(?: (?i:for|options?))*+ (?P<list>{_EITHER})"
    rf"(?: (?i:(?:is|are) (?:correct|right|true)))?|除了?(?P<chinese>{_EITHER})(?:选项)?(?:以外|之外|外) ?,?"
    r"(?:其[余他]的?)?(?:都|均|全部?)?(?:选|对|正确)?的?)\W*"
)
"""All options but some, as in `Everything except B and D`."""
_SWITCHED = re.compile(
    r"(?<!or )(?<!or, )(?i:\b(?:actually|wait|sorry|oops|hmm|scratch that)[ ,.:—-]+(?:no[ ,.:—-]+)?|\bno[,.:—-] ?)"
    r"(?i:(?:it's|it is|make (?:it|that)|i mean|the answer is|i'd say|option) )*(?P<letter>[A-J])\W*$"
)
"""A last letter that replaces an earlier one, as in `B... actually no, C`."""
_NAMED = re.compile(r"(?<![A-Za-z'\\])([A-Z])(?![A-Za-z'\d^_]|\s*=)")
_ARTICLE_A = re.compile(
    r"(?<!option )(?<!choice )(?<!answer )(?<!letter )(?<!pick )(?<!is )(?<!be )(?<!with )(?<!and )(?<!or"
    r" )(?<!, )(?<![A-Za-z'])A "
    r"(?!(?:is|was|are|and|or|fits?|works?|looks?|seems?|match(?:es)?|must|can|does|would|should|has)\b)[a-z]",
    re.IGNORECASE,
)
_ENDS_IN = re.compile(rf"(?:\b(?:is|are|be|has|have|with)|[:是为有])[ :]*(?P<list>{_LIST})$")
_NEGATION = re.compile(
    r"\b(?:not|no|never|neither|nor|wrong|incorrect|false|maybe|perhaps|unless|if)\b|n't\b|[不非没错或否]|可能|也许",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"\b(?:maybe|perhaps|possibly|might|could|unless|if|unsure|likewise)\b|\b[A-J],? too\b|可能|也许|如果",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    r"\b(?:than|unlike|except|between|would|could|might|whereas|while|although|instead|rather|if|or)\b|[比或]|除了",
    re.IGNORECASE,
)
_OR_LETTER = re.compile(r"(?:\b(?i:or)\b|或者?|/) ?[(\[]?[A-J](?![A-Za-z])")
_LABEL = re.compile(r"(?<![A-Za-z])[A-J][.)、:]")
_PIECES = re.compile(r"\s*(?:;|,|、|\n|\band\b|和)\s*")
_ALTERNATIVES = re.compile(r"\s*(?:;|,|/|\bor\b|或者?|\n)\s*")


def selected_options(found: FinalAnswer, options: dict[str, str], *, several: bool) -> frozenset[str] | None:
    """Return the letters that an answer selects; None if it selects none, hedges, or contradicts itself.

    Args:
        options: texts by letter; empty if unknown.
        several: the question may have several right options, so a list of letters is one answer.
    """
    options = {letter: _plain(fold_text(option)) for letter, option in options.items()}
    known = frozenset(options or "ABCDEFGHIJ")
    if several and (labelled := _labelled(_plain(found.tail), options) or _labelled(_plain(found.line), options)):
        return labelled
    if (whole := _same_text(_plain(found.tail), options)) is not None:
        return frozenset(whole)
    if options and several and (kept := _EXCEPT.fullmatch(_plain(found.line))) is not None:
        return known - {*re.findall("[A-Z]", kept["list"] or kept["chinese"])} or None
    if not several and (last := _remaining(found, options, known)) is not None:
        return frozenset(last)
    if found.kind == "line" and (stated := _stated(found, options, known)) is not None:
        return stated if several or len(stated) == 1 else None
    rest = _plain(found.rest)
    repeats_option = any(comparison_key(rest) == comparison_key(option) for option in options.values())
    if not repeats_option and _names_another(rest, options, several=several):
        return None
    for text in dict.fromkeys([_plain(found.line)] if repeats_option else [_plain(found.text), _plain(found.line)]):
        letters = _read(_BUT_NOT.sub("", text) or text, options, known, several=several)
        if letters is not None:
            return letters
    stated = _stated(found, options, known)
    if stated is None and not several and found.kind in ("line", "sentence"):
        stated = _at_the_end(_plain(found.tail), options)
    if stated is None and not several and found.kind == "line":
        same = _same_text(_plain(found.value), options)
        stated = _sole(_plain(found.text), known) if same is None else frozenset(same)
    return stated if stated is not None and (several or len(stated) == 1) else None


def _remaining(found: FinalAnswer, options: dict[str, str], known: frozenset[str]) -> str | None:
    """Return the letter that replaces another one at the end, or the only named one if all others are ruled out."""
    text = _plain(found.tail)
    switched = _SWITCHED.search(text) if found.kind == "line" else None
    if switched is not None:
        return switched["letter"] if switched["letter"] in known else None
    wrong = {
        letter for each in _ELIMINATED.finditer(text) for letter in re.findall("[A-Z]", each["after"] or each["before"])
    }
    left = known - wrong
    rest = _ELIMINATED.sub(" ", text)
    if not options or len(left) != 1 or text.endswith("?") or _UNSURE.search(rest):
        return None
    return next(iter(left)) if {each[1] for each in _NAMED.finditer(rest) if each[1] in known} == left else None


def _sole(sentence: str, known: frozenset[str]) -> frozenset[str] | None:
    """Return the only option in the last sentence, as in `we are left with C`; None if the sentence denies it."""
    letters = {each[1] for each in _NAMED.finditer(sentence) if each[1] != "A" or not _ARTICLE_A.search(sentence)}
    if len(letters) != 1 or not letters <= known or sentence.endswith("?") or _NEGATION.search(sentence):
        return None
    return frozenset(letters)


def _at_the_end(text: str, options: dict[str, str]) -> frozenset[str] | None:
    """Return the option whose words end the last sentence, as in `it gets higher in the sky`, if it is the only one."""
    sentence = re.split(r"(?<=[.!?。！？])\s+|(?<=[。！？])|\n", text.strip(" .。"))[-1].casefold()
    ends = [name for name, option in options.items() if _ends_in(sentence, option.strip(" .。").casefold())]
    longest = max(ends, key=lambda name: len(options[name]), default=None)
    if longest is None or _LABEL.search(text) or _NEGATION.search(sentence) or _COMPARED.search(sentence):
        return None
    rest = sentence[: len(sentence) - len(options[longest].strip(" .。"))]
    others = [option.strip(" .。").casefold() for name, option in options.items() if name != longest]
    return None if any(each in rest for each in others) else frozenset(longest)


def _ends_in(sentence: str, option: str) -> bool:
    return len(option) >= 4 and re.search(rf"(?:^|[\W_]){re.escape(option)}$", sentence) is not None


def _stated(found: FinalAnswer, options: dict[str, str], known: frozenset[str]) -> frozenset[str] | None:
    """Return the letters that sentences call right, as in `A is wrong; B is wrong; therefore C`.

    None if there are none, or one is called right and wrong.
    """
    text = _plain(found.tail if found.kind == "line" else found.line)
    if not options and not re.search(r"(?<![A-Za-z])[A-J](?![A-Za-z])", text):
        return None
    right: set[str] = set()
    wrong: set[str] = set()
    for statement in (*_STATED.finditer(text), *_JUDGED_LINE.finditer(text)):
        (wrong if statement["wrong"] else right).update(re.findall("[A-Z]", statement["list"]))
    only = [set(re.findall("[A-Z]", each["list"])) for each in _ONLY.finditer(text)]
    concluded = _CONCLUDED.search(text.rstrip(" .。!*"))
    if concluded is not None:
        right = set(re.findall("[A-Z]", concluded["list"]))
    elif only:
        right = only[-1]
    elif not right and not wrong and (ending := _ENDS_IN.search(text.rstrip(" .。!*"))) is not None:
        right = set() if _NEGATION.search(text.rpartition("\n")[2]) else set(re.findall("[A-Z]", ending["list"]))
    return frozenset(right) if right and right <= known and not right & wrong else None


def _names_another(rest: str, options: dict[str, str], *, several: bool) -> bool:
    """True if the sentence after an answer names another option as well, as in `B. banana, or cherry`."""
    texts = {comparison_key(option) for option in options.values()}
    if several and _LABEL.search(rest):
        return True
    behind = rest.strip(" .,;:!")
    if _list(behind, frozenset(options or "ABCDEFGHIJ")) or _same_text(behind, options):
        return True
    return _OR_LETTER.search(rest) is not None or any(
        comparison_key(piece) in texts for piece in _ALTERNATIVES.split(rest)[1:]
    )


def _read(text: str, options: dict[str, str], known: frozenset[str], *, several: bool) -> frozenset[str] | None:
    """Return the letters of one text: a letter, an option's words, a list of letters, or a letter followed by more."""
    text = _MARKED.sub(lambda found: found[1] + found[2].upper(), text, count=1) if _MARKED.match(text) else text
    if several and re.fullmatch("[a-j]{2,10}", text) and "".join(sorted({*text})) == text:
        text = text.upper()
    letters = _list(text, known)
    if letters is None or len(letters) > 1:
        exact = _same_text(text, options)
        letters = frozenset(exact) if exact is not None else letters
    if letters is None:
        letters = _led(text, options, known)
    if letters is None and not is_labelled(text, known):
        letters = _by_text(text, options, several=several)
    return letters


def _same_text(text: str, options: dict[str, str]) -> str | None:
    """Return the letter of the only option with these words, with or without its letter; None for a lone letter."""
    if re.fullmatch(r"[A-Za-z]?", text):
        return None
    same = [
        letter
        for letter, option in options.items()
        if comparison_key(text) == comparison_key(option) or _is_own(text, letter, option)
    ]
    return same[0] if len(same) == 1 else None


def _is_own(text: str, letter: str, option: str) -> bool:
    """True if a text is the letter followed by the option, `(D) A and B`."""
    found = _LED.fullmatch(text)
    return (
        found is not None
        and found["letter"] == letter
        and bool(option)
        and comparison_key(found["rest"]) == comparison_key(option)
    )


def is_labelled(text: str, known: Collection[str]) -> bool:
    """True if a text starts with an option letter with a bracket or a mark, as in `B) apple`."""
    found = _LED.fullmatch(text)
    return found is not None and found["letter"] in known and bool(found["open"] or found["mark"].strip(",、"))


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mathit|rm|bf)\s*\{([^{}]*)\}", r"\1", text)
    text = _WITH_TEXT.sub(r"\1. \2", text)
    text = re.sub(r"\$|\\[(),\[\];:!]|\\quad", " ", text)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip(" \n.。*:")


def _list(text: str, known: frozenset[str]) -> frozenset[str] | None:
    """Return the letters of a text that is only a list of letters."""
    if _SMALL.fullmatch(text):
        text = text.upper()
    found = _LETTERS.fullmatch(text)
    letters = re.findall(r"[A-Z]", found[1]) if found else []
    return frozenset(letters) if letters and known.issuperset(letters) else None


def _by_text(text: str, options: dict[str, str], *, several: bool) -> frozenset[str] | None:
    """Return the options whose texts make up an answer."""
    if (one := _option_of(text, options)) is not None:
        return frozenset(one)
    pieces = _PIECES.split(text) if several else []
    if not 1 < len(pieces) <= len(options):
        return None
    named = [_option_of(piece, options) for piece in pieces]
    return frozenset(each for each in named if each) if all(named) else None


def _option_of(text: str, options: dict[str, str]) -> str | None:
    """Return the letter of the only option with the same meaning."""
    exact = [letter for letter, option in options.items() if comparison_key(option) == comparison_key(text)]
    close = {letter: option for letter, option in options.items() if len(text) <= 2 * len(option) + 100}
    same = exact or [letter for letter, option in close.items() if compare_texts(option, text) is True]
    return same[0] if len(same) == 1 else None


def _led(text: str, options: dict[str, str], known: frozenset[str]) -> frozenset[str] | None:
    """Return the letter at the start of an answer, unless the text after it is, or names, another option."""
    found = _LED.fullmatch(text)
    if found is None or found["letter"] not in known:
        return None
    letter, rest = found["letter"], found["rest"].strip()
    if not found["open"] and not found["mark"].strip(",、") and re.match(r"[,、;\s]*[=$\d\\(]", rest):
        return None
    own = options.get(letter, "")
    if own and comparison_key(rest) == comparison_key(own):
        return frozenset(letter)
    if (not found["open"] and not found["mark"] and not _SENTENCE.match(rest)) or _DENIED.match(rest):
        return None
    rest = rest.removeprefix(own) if own else rest
    rest = _REASON.split(rest, maxsplit=1)[0]
    others = {
        name: option
        for name, option in options.items()
        if name != letter and comparison_key(option) != comparison_key(own)
    }
    pieces = [piece for piece in [rest, *_ALTERNATIVES.split(rest)] if piece.strip()]
    if any(comparison_key(piece) == comparison_key(option) for piece in pieces for option in others.values()):
        return None
    if any(
        each["letter"] in known - {letter} and (each["before"] or not each["article"]) for each in _OTHER.finditer(rest)
    ):
        return None
    return frozenset(letter)


def _labelled(text: str, options: dict[str, str]) -> frozenset[str] | None:
    """Return the letters of `A. water; C. steam`, where each letter precedes the text of its option."""
    for letter, option in options.items():
        text = re.sub(rf"(?<![A-Za-z])[(\[]?{letter}[)\].:、]*\s*{re.escape(option.strip(' .'))}", letter, text)
    return _list(" ".join(text.replace("\n", " ").split()).strip(" .。"), frozenset(options)) if options else None
