"""The math reward: extract the final answer, compare texts and numbers here, and ask math-verify for the rest.

math-verify runs in a grader process, which is killed when it takes too long.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from rollmill.config.rewards import MathReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, Verdict
from rollmill.rewards.choices import chosen, known_options, letter_of
from rollmill.rewards.comparison import TRIGONOMETRY, Question, Rules, settle
from rollmill.rewards.extraction import boxed, extract, hashed
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.numbers import normalised, squeezed

LONGEST_ANSWER = 2000
"""Characters; a longer answer earns 0 with the outcome `too_long`."""
DEEPEST_ANSWER = 100
"""Braces and parentheses inside each other; a deeper answer earns 0 with the outcome `too_deep`."""
_ROUNDING = Fraction(1, 10**9)
"""Relative difference allowed where the reference is a Python float."""


class Math:
    """1 if the final answer equals the reference, else 0. A task without an answer is not judged.

    A task's column `math` may hold `extract`, `tolerance` and `units` of its own. Its column `options` or `choices`
    says what the option letters stand for.
    """

    def __init__(self, config: MathReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        if task.answer is None:
            return Verdict(None)
        gold, config = reference(task.answer), self._config.of_task(task.taskset, task.metadata)
        answer = extract(completion.text, config.extract)
        if answer is None:
            return Verdict(0.0, "no_answer")
        if squeezed(normalised(answer)) == squeezed(normalised(gold)):
            return Verdict(1.0)
        if len(answer) > LONGEST_ANSWER:
            return Verdict(0.0, "too_long")
        if _depth(answer) > DEEPEST_ANSWER:
            return Verdict(0.0, "too_deep")
        slack = max(Fraction(config.tolerance), _ROUNDING if isinstance(task.answer, float) else Fraction(0))
        rules = Rules(slack, units_required=config.units == "required")
        return await self._compared(*_meant(gold, answer, known_options(task.metadata), rules), rules)

    async def _compared(self, gold: str, answer: str, rules: Rules) -> Verdict:
        questions = settle(gold, answer, rules)
        queued = worked = 0.0
        for question in questions if isinstance(questions, list) else []:
            reply = await self._graders.ask("math", _payload(question, rules), self._config.time_limit_s)
            queued, worked = queued + reply.queued, worked + reply.worked
            if reply.outcome != OK:
                return Verdict(self._config.timeout_reward, reply.outcome, queued, worked)
            if reply.value != 1.0:
                return Verdict(0.0, OK, queued, worked)
        return Verdict(float(questions is not False), OK, queued, worked or None)


def reference(answer: object) -> str:
    """The reference as text; of a worked solution only its last \\boxed{} or what follows "####".

    Raises TypeError when it is neither text nor a number.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    text = str(answer)
    return boxed(text) or hashed(text) or text


def _meant(gold: str, answer: str, options: dict[str, str], rules: Rules) -> tuple[str, str]:
    """What is to be compared where the options are known: letters, or what the options say.

    A letter stands for its option, and the text of an option for its letter. A letter with the text of another option
    is compared as that other option.
    """
    letter, choice = letter_of(normalised(gold)), chosen(normalised(answer))
    said = normalised(answer) if choice is None else choice[1]
    exact = replace(rules, slack=Fraction(0))
    if letter in options:
        meant = [name for name, option in options.items() if said and settle(option, said, exact) is True]
        return gold, (meant[0] if len(meant) == 1 else answer)
    if options and choice is not None and not choice[1]:
        return gold, options.get(choice[0], answer)
    return gold, answer


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _payload(question: Question, rules: Rules) -> dict[str, object]:
    golds, answers = ([_latex(text) for text in texts] for texts in (question.golds, question.answers))
    return {"gold": golds, "answer": answers, "tolerance": float(rules.slack)}


def _latex(text: str) -> str:
    """The text as LaTeX that math-verify reads: sqrt(2), pi and 1e-7 are common in answers too."""
    text = re.sub(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√ ?(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(\d)[eE]([+-]?\d+)", r"\1 \\times 10^{\2}", text)
    if TRIGONOMETRY.search(text):
        text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"{\\frac{\1 \\pi}{180}}", text)
    return text.replace("$", "").replace("%", "\\%").replace("°", "^{\\circ}")
