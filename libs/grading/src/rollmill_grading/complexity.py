"""Bounds the cost of comparing an answer, from its text, before any symbolic work.

Symbolic algebra runs for seconds to hours on short formulas such as 9^{9^{9^9}}. A policy that drifts there would stall
the rewards, because each such answer ends a grader process. So the length of an answer, its depth, the size of its
numbers and the number of its terms are bounded. Linear in the length of the text.
"""

from __future__ import annotations

import re

TOO_COSTLY = "too_costly"
"""Outcome of an answer whose comparison would take too much work."""
MAX_ANSWER_CHARS = 2000
"""Characters; a longer answer earns 0 with the outcome `too_long`."""
MAX_ANSWER_DEPTH = 100
"""Levels of nested brackets of any kind; a deeper answer earns 0 with the outcome `too_deep`."""

_LONGEST_FORMULA = 600
"""Characters of one expression for symbolic algebra."""
_DEEPEST_FORMULA = 12
"""Levels of nested brackets in it."""
_MOST_TERMS = 40
_MOST_ROOTS = 8
_MOST_POWERS = 12
_MOST_LETTERS = 60
_MOST_FUNCTIONS = 8
_LARGEST_EXPONENT = 3000
_LARGEST_EXPONENT_OF_A_NAME = 30
_LARGEST_EXPONENT_OF_A_SUM = 8
_DEEPEST_NESTING = 4
"""Levels of nested roots, fractions and functions."""
_LARGEST_FACTORIAL = 170
_LARGEST_BINOMIAL = 500
_MOST_CELLS = 60
_MOST_BARS = 8
_MOST_DIGITS = 120
_MOST_DIGITS_IN_A_ROOT = 12

_TERMS = re.compile(r"[+\-−±*/]|\\(?:pm|mp|cdot|times|div|cup|cap)(?![A-Za-z])|[,;]")
_ROOTS = re.compile(r"\\?sqrt|√")
_POWERS = re.compile(r"\^|\*\*")
_FUNCTIONS = re.compile(
    r"\\?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sinh|cosh|tanh|arc\w{3}|max|min|bmod|pmod|mod)(?![a-z])"
)
_OPERATORS = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|frac\s*\{\s*d\s*\}|partial|nabla|det|bigcup|bigcap|coprod|Gamma|zeta|gcd|lcm)(?![A-Za-z])"
)
_FACTORIAL = re.compile(r"(?P<number>\d+)\s*!|(?P<group>[)\]}])\s*!|!\s*!")
_BINOMIAL = re.compile(r"\\(?:[dt]?binom|choose)(?![A-Za-z])|(?<![A-Za-z])[CP]\s*[_^(]")
_LETTERS = re.compile(r"(?<!\\)[A-Za-z](?![a-z]{3,}\{)")
_NESTING = re.compile(
    r"(?P<open>(?:\\(?:sqrt|[dt]?frac|sin|cos|tan|log|ln|exp|arc\w{3}|sinh|cosh|tanh)(?![A-Za-z])(?:\[[^\]]*\])?(?:_\{?\w+\}?)?"
    r"|(?:sqrt|sin|cos|tan|log|ln|exp)(?=\())\s*(?:\\left)?\s*[{(])|[{(]|[})]"
)
_LONG_ROOT = re.compile(rf"(?:sqrt|√)\s*(?:\[[^\]]*\])?\s*[{{(]?\s*-?\d{{{_MOST_DIGITS_IN_A_ROOT + 1}}}")
_DIGITS = re.compile(r"\d[\d,]*")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*")
_EXPONENT_NUMBER = re.compile(r"\{?\s*\(?\s*[+-]?\s*(\d+)")
_SCIENTIFIC = re.compile(r"\d[eE][+-]?\d{4,}")
_LATEX_SIZES = re.compile(r"\\(?:left|right|displaystyle|mathrm|text|operatorname|big+|Big+)(?![A-Za-z])")


def oversize_outcome(answer: str) -> str | None:
    """Return the outcome of an answer that is too large to compare: `too_long`, `too_deep`, else None."""
    if len(answer) > MAX_ANSWER_CHARS:
        return "too_long"
    return "too_deep" if _depth(answer) > MAX_ANSWER_DEPTH else None


def is_too_costly(gold: str, answer: str) -> bool:
    """True if symbolic algebra on an answer might take long; never if it has the form of the reference.

    Unevaluated sums, integrals and limits are compared only if the reference has one as well.
    """
    if _OPERATORS.search(answer) and not _OPERATORS.search(gold):
        return True
    if _has_large_numbers(gold):
        return False
    if _nesting(answer) > max(_DEEPEST_NESTING, _nesting(gold)):
        return True
    if len(answer) <= len(gold) + 20:
        return _has_large_numbers(answer)
    counts = (
        (len(answer), _LONGEST_FORMULA),
        (_depth(answer), _DEEPEST_FORMULA),
        (len(_TERMS.findall(answer)), _MOST_TERMS),
        (len(_ROOTS.findall(answer)), _MOST_ROOTS),
        (len(_POWERS.findall(answer)), _MOST_POWERS),
        (len(_FUNCTIONS.findall(answer)), _MOST_FUNCTIONS),
        (len(_LETTERS.findall(answer)), _MOST_LETTERS),
        (answer.count("&"), _MOST_CELLS),
        (answer.count("|"), _MOST_BARS),
    )
    return any(found > most for found, most in counts) or _has_large_numbers(answer)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in _LATEX_SIZES.sub("", text):
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _nesting(text: str) -> int:
    """Return the depth of nested roots, fractions and functions."""
    open_brackets: list[bool] = []
    deepest, ended = 0, -1  # where an argument ended: a second one may follow
    for token in _NESTING.finditer(text):
        if token[0] in "})":
            if open_brackets and open_brackets.pop():
                ended = token.end()
            continue
        open_brackets.append(token["open"] is not None or token.start() == ended)
        deepest = max(deepest, sum(open_brackets)) if open_brackets[-1] else deepest
        if len(open_brackets) > _LONGEST_FORMULA:
            break
    return deepest


def _has_large_numbers(text: str) -> bool:
    """True if it has powers, factorials, binomials or digits beyond those of plausible answers."""
    if (
        _SCIENTIFIC.search(text)
        or _LONG_ROOT.search(text)
        or any(len(found) > _MOST_DIGITS for found in _DIGITS.findall(text))
    ):
        return True
    for factorial in _FACTORIAL.finditer(text):
        if factorial["number"] is None or int(factorial["number"][:9]) > _LARGEST_FACTORIAL:
            return factorial["group"] is None or bool(re.search(r"\d{3,}|!|\^", text[: factorial.start()]))
    if _BINOMIAL.search(text) and any(
        int(found.replace(",", "")[:9]) > _LARGEST_BINOMIAL for found in _DIGITS.findall(text)
    ):
        return True
    return _has_large_powers(text)


def _has_large_powers(text: str) -> bool:
    """True if an exponent is large, has a numeric exponent itself, or belongs to a long sum."""
    for power in _EXPONENT.finditer(text):
        number = _EXPONENT_NUMBER.match(text, power.end())
        exponent = _group(text, power.end())
        if re.search(r"\^|\*\*|!", exponent) and not re.search(r"[A-Za-z]", exponent):
            return True
        if len(_POWERS.findall(exponent)) > 1:
            return True
        if number is None:
            continue
        size = int(number[1][:9])
        base = text[: power.start()].rstrip()[-1:]
        digits = len(re.search(r"\d*$", text[: power.start()].rstrip())[0])  # type: ignore[index]
        largest = _LARGEST_EXPONENT_OF_A_NAME if base.isalpha() and base != "e" else _LARGEST_EXPONENT
        if _is_sum(text, power.start()):
            largest = 2 if len(_ROOTS.findall(text)) > 2 else _LARGEST_EXPONENT_OF_A_SUM
        if size > largest or digits * size > _LARGEST_EXPONENT:
            return True
    return False


def _group(text: str, at: int) -> str:
    """Return the exponent at a position: a group in braces or parentheses, or one character with its own exponent."""
    if at >= len(text) or text[at] not in "{(":
        return text[at : at + 3] if text[at + 1 : at + 2] in "^!" else text[at : at + 1]
    depth = 0
    for place in range(at, min(len(text), at + _LONGEST_FORMULA)):
        depth += (text[place] in "{(") - (text[place] in "})")
        if depth == 0:
            return text[at : place + 1] + (
                text[place + 1 : place + 3] if text[place + 1 : place + 2] in ("^", "!") else ""
            )
    return text[at:]


def _is_sum(text: str, end: int) -> bool:
    """True if the base that ends before a position is a group with a plus or minus sign."""
    before = text[:end].rstrip()
    before = before.removesuffix("\\right)") + ")" if before.endswith("\\right)") else before
    if not before or before[-1] not in ")]}":
        return False
    depth = 0
    for place in range(len(before) - 1, -1, -1):
        depth += (before[place] in ")]}") - (before[place] in "([{")
        if depth == 0:
            return bool(re.search(r"[+\-]", before[place + 1 : -1]))
    return True
