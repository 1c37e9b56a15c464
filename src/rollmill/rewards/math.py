"""The math reward: find the final answer, compare texts and numbers here, and ask math-verify for the rest.

math-verify runs in a grader process, which is killed when it takes too long.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from rollmill.config.rewards import MathReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.answers.final import FinalAnswer, final_answer, reference_text
from rollmill.rewards.answers.letters import chosen as chosen_letters
from rollmill.rewards.answers.limits import too_much
from rollmill.rewards.base import HEDGED, NO_ANSWER, OK, Verdict
from rollmill.rewards.choices import chosen, known_options, letter_of
from rollmill.rewards.comparison import Rules, is_words, settle
from rollmill.rewards.formulas import compared
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.numbers import normalised, squeezed

_ROUNDING = Fraction(1, 10**9)
"""Relative difference allowed where the reference is a Python float."""


class Math:
    """1 if the final answer equals the reference, else 0. A task without an answer is not judged.

    A task's column `math` may hold `extract`, `tolerance` and `units` of its own. Its column `options` or `choices`
    says what the option letters stand for. Outcomes besides ok: `no_answer`, `hedged`, `too_long`, `too_deep`,
    `too_costly`, `timeout`, `memory`.
    """

    def __init__(self, config: MathReward, graders: GraderPool) -> None:
        self._config, self._graders = config, graders

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        if task.answer is None:
            return Verdict(None)
        gold, config = reference(task.answer), self._config.of_task(task.taskset, task.metadata)
        plain = normalised(gold)
        in_words = letter_of(plain) is not None or is_words(plain)
        found = final_answer(completion.text, config.extract, values=not in_words)
        if in_words and (found is None or found.kind == "line"):
            found = _formula_answer(completion.text) or found
        if found is None or not (answer := found.text if in_words else found.value):
            return Verdict(0.0, NO_ANSWER)
        if found.hedged:
            return Verdict(0.0, HEDGED)
        if squeezed(plain) in (squeezed(normalised(answer)), squeezed(normalised(found.text))):
            return Verdict(1.0)
        if (outcome := too_much(answer)) is not None:
            return Verdict(0.0, outcome)
        slack = max(Fraction(config.tolerance), _ROUNDING if isinstance(task.answer, float) else Fraction(0))
        rules = Rules(slack, units_required=config.units == "required")
        options = known_options(task.metadata)
        if in_words:
            answer = _in_words(plain, found, options)
        return await self._compared(*_meant(gold, answer, options, rules), rules)

    async def _compared(self, gold: str, answer: str, rules: Rules) -> Verdict:
        reply = await compared(gold, answer, rules, self._graders, self._config.time_limit_s)
        if reply.outcome == "too_costly":
            return Verdict(0.0, reply.outcome)
        if reply.outcome != OK:
            return Verdict(self._config.timeout_reward, reply.outcome, reply.queued, reply.worked)
        return Verdict(float(reply.value), OK, reply.queued, reply.worked)


def reference(answer: object) -> str:
    """The reference as text; of a worked solution only its last \\boxed{} or what follows "####".

    Raises TypeError when it is neither text nor a number, ValueError when it is empty.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    text = str(answer)
    if not text.strip():
        raise ValueError("the task's answer is empty; give one, or null where the math reward does not apply")
    return reference_text(text)


def _formula_answer(text: str) -> FinalAnswer | None:
    """The answer where the last sentence names a letter or words as a formula, as in `so we get $D$`."""
    found = final_answer(text)
    return (
        found if found is not None and re.fullmatch(r"\$\W*[A-Za-z]\W*\$|\\\(\W*[A-Za-z]\W*\\\)", found.value) else None
    )


def _in_words(gold: str, found: FinalAnswer, options: dict[str, str]) -> str:
    """The letter or the words that an answer to a question for such names."""
    if letter_of(gold) is None:
        return found.value
    if letter_of(normalised(found.value)) is not None:
        return found.value
    letters = chosen_letters(found, options, several=False)
    if letters is None or chosen(normalised(found.text)) is not None:
        return found.text
    return "".join(sorted(letters))


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
