"""Comparing two answers: texts and numbers here, single formulas by math-verify in a grader process."""

from __future__ import annotations

import re

from rollmill.rewards.answers.comparison import TRIGONOMETRY, AnswerMatchOptions, SymbolicEquality, compare_texts
from rollmill.rewards.answers.complexity import is_too_costly
from rollmill.rewards.base import OK
from rollmill.rewards.grader_pool import GraderPool, GraderResult

_NAME = re.compile(
    r"\\(?:[Gg]amma|[Dd]elta|[Tt]heta|[Ll]ambda|[Xx]i|[Ss]igma|[Pp]hi|[Pp]si|[Oo]mega)(?![A-Za-z])"
    r"|(?P<kept>\\mathbb ?\{?[A-Z]|\\[A-Za-z]+|(?<![A-Za-z])(?=[A-Za-z]*[AEIOUaeiou])[A-Za-z]{3,})|[A-Za-z]"
)
"""A name in a formula: a letter or a Greek one. Words, sets of numbers and other commands are none."""
_BRACKETED_COMMA = re.compile(r"[(\[{][^)\]}]*,")
_MOST_PAIRED = 30
"""Items of a set that are paired off by algebra."""
_SPARE = "zwyxvutsrqpnmlkhgfcba"
"""Letters that may take the place of a capital; d, e, i, j and o mean something."""


async def compare_answers(
    gold: str, answer: str, rules: AnswerMatchOptions, graders: GraderPool, time_limit_s: float
) -> GraderResult:
    """1 where the answer equals the reference, else 0; another outcome than "ok" where a grader process did not say.

    `time_limit_s` holds for each formula. Raises RewardError when the grader itself fails.
    """
    questions = compare_texts(gold, answer, rules)
    queued = 0.0
    worked: float | None = None
    open_questions = questions if isinstance(questions, list) else []
    if any(len(each.answers) > _MOST_PAIRED or _is_too_costly(each) for each in open_questions):
        return GraderResult("too_costly")
    for question in open_questions:
        reply = await graders.ask("math", _payload(question, rules), time_limit_s)
        queued, worked = queued + reply.queue_s, (worked or 0.0) + (reply.run_s or 0.0)
        if reply.outcome != OK or reply.value != 1.0:
            return GraderResult(reply.outcome, 0.0, queued, worked)
    return GraderResult(OK, float(questions is not False), queued, worked)


def _is_too_costly(question: SymbolicEquality) -> bool:
    gold = max(question.golds, key=len, default="")
    return any(is_too_costly(gold, answer) for answer in question.answers)


def _payload(question: SymbolicEquality, rules: AnswerMatchOptions) -> dict[str, object]:
    texts = _cases_apart([_latex(text) for text in (*question.golds, *question.answers)])
    count = len(question.golds)
    return {"gold": texts[:count], "answer": texts[count:], "tolerance": float(rules.slack)}


def _cases_apart(texts: list[str]) -> list[str]:
    """The same formulas, where R and r both occur with another letter for R: math-verify takes them for the same.

    Where no letter is left it is a sign that nothing equals.
    """
    names = {found[0] for text in texts for found in _NAME.finditer(text) if not found["kept"]}
    capitals = sorted(name for name in names if name != name.lower() and name.lower() in names)
    if not capitals:
        return texts
    taken = {name.lower() for name in names}
    spare = iter([letter for letter in _SPARE if letter not in taken])
    instead = {name: next(spare, "?") for name in capitals}
    return [_NAME.sub(lambda found: instead.get(found[0], found[0]), text) for text in texts]


def _latex(text: str) -> str:
    """The text as LaTeX that math-verify reads: sqrt(2), pi and 1e-7 are common in answers too."""
    text = re.sub(r"\\[dt]?binom ?(\d) ?(\d)", r"\\binom{\1}{\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√ ?(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    if not _BRACKETED_COMMA.search(text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(\d)[eE]([+-]?\d+)", r"\1 \\times 10^{\2}", text)
    if TRIGONOMETRY.search(text):
        text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"{\\frac{\1 \\pi}{180}}", text)
    return text.replace("$", "").replace("%", "\\%").replace("°", "^{\\circ}")
