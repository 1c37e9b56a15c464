"""Compares two answers: texts and numbers here, single formulas by math-verify in a grader process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from concurrent.futures import Future
from itertools import chain

from rollmill_grading.comparison import TRIGONOMETRY, AnswerMatchOptions, SymbolicEquality, compare_texts
from rollmill_grading.complexity import TOO_COSTLY, is_too_costly
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.verdict import OK
from rollmill_grading.worker_process import GraderResult, WorkerFunction

ALGEBRA = WorkerFunction("math", "rollmill_grading.algebra:load_algebra")
"""The function that grader processes load to compare formulas."""

_NAME = re.compile(
    r"\\(?:[Gg]amma|[Dd]elta|[Tt]heta|[Ll]ambda|[Xx]i|[Ss]igma|[Pp]hi|[Pp]si|[Oo]mega)(?![A-Za-z])"
    r"|(?P<kept>\\mathbb ?\{?[A-Z]|\\[A-Za-z]+|(?<![A-Za-z])(?=[A-Za-z]*[AEIOUaeiou])[A-Za-z]{3,})|[A-Za-z]"
)
"""A name in a formula: a Latin or Greek letter. Words, number sets and other commands do not count."""
_MISREAD = re.compile(
    r"\\frac ?\{ ?(?:d|\\partial ?)(?:\^ ?\{?\d\}?)? ?\{?\\?[A-Za-z]+\}?(?:\([a-z]\))? ?\}"
    r" ?\{ ?(?:(?:d|\\partial ?) ?[A-Za-z](?:\^ ?\{?\d\}?)? ?)+\}"
    r"|\\d?dot ?\{?[A-Za-z]\}?|(?<![\\A-Za-z])[A-Za-z](?:'+|\^ ?\{? ?(?:\\prime ?)+\}?)(?:\([a-z]\))?"
    r"|(?<![\\A-Za-z])[EeIid]_ ?(?:\{ ?\w+ ?\}|\w)"
)
"""The derivative of a name, which is 0 to math-verify, and names with an index whose letter has a meaning to it."""
_BRACES = re.compile(r"[\s{}]")
_BRACKETED_COMMA = re.compile(r"[(\[{][^)\]}]*,")
_MOST_PAIRED = 30
"""Items of a set that symbolic algebra pairs."""
_SPARE = "zwyxvutsrqpnmlkhgfcba"
"""Letters that may replace a capital; d, e, i, j and o have a meaning."""


async def compare_answers(
    gold: str, answer: str, rules: AnswerMatchOptions, graders: GraderPool, time_limit_s: float
) -> GraderResult:
    """Return 1 if the answer equals the reference, else 0; an outcome besides "ok" if a grader did not decide.

    `time_limit_s` applies to each formula. Raises GradingError if the grader itself fails.
    """
    decision = compare_texts(gold, answer, rules)
    if isinstance(decision, bool):
        return GraderResult(OK, float(decision))
    return await start_comparison(decision, rules, graders, time_limit_s)


def start_comparison(
    equalities: list[SymbolicEquality], rules: AnswerMatchOptions, graders: GraderPool, time_limit_s: float
) -> Awaitable[GraderResult]:
    """Start to find out whether all equalities that `compare_texts` left open hold, and return what to await.

    The first one is with the graders when this returns, however busy the event loop is.
    """
    if any(len(each.answers) > _MOST_PAIRED or _is_too_costly(each) for each in equalities):
        return asyncio.sleep(0, GraderResult(TOO_COSTLY))

    def send(equality: SymbolicEquality) -> Future[GraderResult]:
        return graders.submit(ALGEBRA, _payload(equality, rules), time_limit_s)

    async def all_hold(first: list[Future[GraderResult]], others: list[SymbolicEquality]) -> GraderResult:
        queue_s, run_s = 0.0, None
        for sent in chain(first, map(send, others)):
            reply = await asyncio.wrap_future(sent)
            queue_s, run_s = queue_s + reply.queue_s, (run_s or 0.0) + (reply.run_s or 0.0)
            if reply.outcome != OK or reply.value != 1.0:
                outcome = TOO_COSTLY if reply.value == TOO_COSTLY else reply.outcome
                return GraderResult(outcome, 0.0, queue_s, run_s)
        return GraderResult(OK, 1.0, queue_s, run_s)

    return all_hold([send(each) for each in equalities[:1]], equalities[1:])


def _is_too_costly(equality: SymbolicEquality) -> bool:
    gold = max(equality.golds, key=len, default="")
    return any(is_too_costly(gold, answer) for answer in equality.answers)


def _payload(equality: SymbolicEquality, rules: AnswerMatchOptions) -> dict[str, object]:
    texts = _cases_apart(_misread_names([_latex(text) for text in (*equality.golds, *equality.answers)]))
    count = len(equality.golds)
    return {"gold": texts[:count], "answer": texts[count:], "tolerance": float(max(rules.slack, equality.slack))}


def _misread_names(texts: list[str]) -> list[str]:
    r"""Replace `\frac{dy}{dx}`, `y'` and `\dot y` and `E_1` by letters of their own."""
    found = sorted({_BRACES.sub("", each[0]) for text in texts for each in _MISREAD.finditer(text)})
    taken = {each[0].lower() for text in texts for each in _NAME.finditer(_MISREAD.sub(" ", text))}
    spare = iter([letter for letter in _SPARE if letter not in taken])
    replacements = {name: next(spare, "?") for name in found}
    return [_MISREAD.sub(lambda each: f" {replacements[_BRACES.sub('', each[0])]} ", text) for text in texts]


def _cases_apart(texts: list[str]) -> list[str]:
    """Replace capitals that also occur in lower case by other letters: math-verify treats R and r as equal.

    If no letter is left, the replacement is a sign that equals nothing.
    """
    names = {found[0] for text in texts for found in _NAME.finditer(text) if not found["kept"]}
    capitals = sorted(name for name in names if name != name.lower() and name.lower() in names)
    if not capitals:
        return texts
    taken = {name.lower() for name in names}
    spare = iter([letter for letter in _SPARE if letter not in taken])
    replacements = {name: next(spare, "?") for name in capitals}
    return [_NAME.sub(lambda found: replacements.get(found[0], found[0]), text) for text in texts]


def _latex(text: str) -> str:
    """Convert the text to LaTeX for math-verify: answers also have sqrt(2), pi and 1e-7."""
    text = re.sub(r"\\[dt]?binom ?(\d) ?(\d)", r"\\binom{\1}{\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√ ?(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(?<=[\d+\-*/])\((\d{1,3}(?:,\d{3})+)\)", lambda found: f"({found[1].replace(',', '')})", text)
    if not _BRACKETED_COMMA.search(text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(
        r"(?<![_\d.])(\d[\d.]*) ?(\\left ?)?([(\[])(?![)\]])", r"\1 \\cdot \2\3", text
    )  # a mixed number to math-verify
    text = re.sub(r"(\d)[eE]([+-]?\d+)", r"\1 \\times 10^{\2}", text)
    if TRIGONOMETRY.search(text):
        text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"{\\frac{\1 \\pi}{180}}", text)
    return text.replace("$", "").replace("%", "\\%").replace("°", "^{\\circ}")
