"""Checks of tasks: answers in prompts, duplicates, overlap with held-out tasks, prompts that are too long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import regex

from rollmill.apps.audit.findings import Finding, Severity, finding_by_share, list_task_ids, passed_check, skipped_check
from rollmill.apps.audit.oracle import NormalizedText, normalize_phrase, parse_number, reference_text, states_answer
from rollmill.data.operators.batch import TaskBatch, TaskOperatorReport
from rollmill.data.operators.builtin.deduplication import DecontaminateTasks, DeduplicateTasks, normalize_text
from rollmill.errors import ConfigError
from rollmill.rewards.base import task_options
from rollmill.types import Task

_SHORT_DIGITS, _SHORT_LETTERS = 3, 5
_COMMON = 0.02
_FEW = 40  # fewer distinctive answers do not give a reliable share


def check_leakage(tasks: Sequence[Task]) -> Finding:
    """Find answers that occur in their own prompt.

    Short answers occur in many prompts by accident, so only distinctive ones count: numbers of three digits or more and
    texts of five letters or more, in at most 2 % of the other prompts. An answer stated as one ("the answer is 7")
    counts whatever its length, unless other prompts state it as well (worked examples do). Option letters, and option
    texts, belong in a prompt.
    """
    prompts = [NormalizedText(_whole(task)) for task in tasks]
    known = [(number, answer) for number, task in enumerate(tasks) if (answer := reference_text(task)) is not None]
    checked = [(number, answer) for number, answer in known if not _is_option(tasks[number], answer)]
    if not checked:
        return skipped_check("leakage", "no task has an answer besides an option" if known else "no task has an answer")
    stated = [tasks[number].id for number, answer in checked if _is_stated(prompts, number, answer)]
    distinctive = [(number, answer) for number, answer in checked if _is_distinctive(answer)]
    numbers_in = Counter(value for prompt in prompts for value in prompt.numbers)
    found = [
        tasks[number].id for number, answer in distinctive if _appears_in_prompt(prompts, numbers_in, number, answer)
    ]
    leaked = list(dict.fromkeys([*stated, *found]))
    short = len(checked) - len(distinctive)
    numbers = {"asked": len(checked), "telling": len(distinctive), "announced": len(stated)}
    if not leaked:
        return passed_check(
            "leakage",
            f"no prompt gives its answer away ({len(distinctive)} distinctive answers, {short} short)",
            **numbers,
        )
    text = f"the answer occurs in the prompt of {len(leaked)} of {len(checked)} tasks ({list_task_ids(leaked)})"
    advice = "look at these: remove the answer from the prompt, or drop the task; a few may be chance"
    share = max(len(stated) / len(checked), len(found) / max(len(distinctive), _FEW))
    return finding_by_share("leakage", share, 0.05, text, advice, leaked, **numbers)


def _whole(task: Task) -> str:
    """Return the whole prompt, including a system message."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(message["content"] for message in task.prompt)


def _is_distinctive(answer: str) -> bool:
    if parse_number(answer) is not None:
        return sum(letter.isdigit() for letter in answer.strip("0 .,")) >= _SHORT_DIGITS
    return sum(letter.isalnum() for letter in answer) >= _SHORT_LETTERS


def _is_option(task: Task, answer: str) -> bool:
    options = {normalize_text(each) for each in task_options(task.metadata).values()}
    letters = regex.fullmatch(r"[A-Ga-g](?:[,; ]*[A-Ga-g])*", answer.strip()) is not None
    choices = "choices" in task.metadata or "options" in task.metadata
    return letters or normalize_text(answer) in options or (choices and bool(regex.fullmatch(r"\d", answer)))


def _appears_in_prompt(prompts: Sequence[NormalizedText], numbers: Counter[Fraction], number: int, answer: str) -> bool:
    """True if the answer occurs in its own prompt, and in few others; `numbers` counts the prompts with each number."""
    value = parse_number(answer)
    if not prompts[number].has(answer, value):
        return False
    phrase = normalize_phrase(answer)
    count = numbers[value] if value is not None else sum(phrase in prompt.text for prompt in prompts)
    return count - 1 <= max(1, _COMMON * (len(prompts) - 1))


def _is_stated(prompts: Sequence[NormalizedText], number: int, answer: str) -> bool:
    if not states_answer(prompts[number].raw, answer):
        return False
    others = sum(states_answer(prompt.raw, answer) for at, prompt in enumerate(prompts) if at != number)
    return others <= max(1, _COMMON * (len(prompts) - 1))


def check_duplicates(tasks: Sequence[Task]) -> Finding:
    """Find tasks that ask the same, or nearly the same; the same question with two answers is worse."""
    try:
        report = _report(tasks, "near")
        how = "nearly the same"
    except ConfigError:  # the library for near duplicates is not installed
        report, how = _report(tasks, "exact"), "the same"
    conflicts = [task for task, why in report.dropped.items() if why != "duplicate"]
    if not report.dropped:
        return passed_check("duplicates", f"no two of {len(tasks)} tasks ask {how}")
    named = list_task_ids(list(report.dropped))
    text = f"{len(report.dropped)} of {len(tasks)} tasks ask {how} as an earlier one ({named})"
    if conflicts:
        text += f"; {len(conflicts)} of them have another answer ({list_task_ids(conflicts)})"
    advice = "put `deduplicate` into taskset.pipeline (by: near, conflicting: drop)"
    same = [task for task in _report(tasks, "exact").dropped.items() if task[1] != "duplicate"]
    severity = Severity.PROBLEM if same or len(report.dropped) > 0.2 * len(tasks) else Severity.WARNING
    return Finding("duplicates", severity, text, advice, list(report.dropped), {"conflicts": len(conflicts)})


def _report(tasks: Sequence[Task], by: str) -> TaskOperatorReport:
    report = TaskOperatorReport("audit", "deduplicate", len(tasks))
    options = {"name": "deduplicate", "by": by} | ({"threshold": 0.8} if by == "near" else {})
    DeduplicateTasks.model_validate(options)(TaskBatch(tasks, report))
    return report


def check_contamination(tasks: Sequence[Task], held_out: Sequence[Task]) -> Finding:
    """Find training tasks that overlap with held-out ones."""
    if not held_out:
        return skipped_check("contamination", "there is no evaluation to compare with")
    report = TaskOperatorReport("audit", "decontaminate", len(tasks))
    operator = DecontaminateTasks()
    operator.compare_with(held_out)
    operator(TaskBatch(tasks, report))
    if not report.dropped:
        return passed_check("contamination", f"none of {len(tasks)} tasks overlaps with {len(held_out)} held-out ones")
    same = [task for task, why in report.dropped.items() if why == "held out"]
    named = list_task_ids(list(report.dropped))
    text = f"{len(report.dropped)} of {len(tasks)} tasks overlap with held-out ones ({named})"
    text += f"; {len(same)} are the same" if same else ""
    severity = Severity.PROBLEM if same or len(report.dropped) > 0.01 * len(tasks) else Severity.WARNING
    advice = "the evaluation would measure memory; put `decontaminate` into taskset.pipeline"
    return Finding("contamination", severity, text, advice, list(report.dropped), {"same": len(same)})


def check_prompt_length(lengths: dict[str, int], context: int, max_new_tokens: int) -> Finding:
    """Find prompts that leave too little room; `lengths` are tokens by task."""
    over = [task for task, length in lengths.items() if length >= context]
    tight = [task for task, length in lengths.items() if length + max_new_tokens > context]
    longest = max(lengths.values())
    numbers = {"longest": longest, "median": sorted(lengths.values())[len(lengths) // 2], "context": context}
    if not tight:
        return passed_check(
            "prompt_length", f"the longest prompt has {longest} tokens; the context is {context}", **numbers
        )
    text = f"{len(tight)} of {len(lengths)} prompts leave less than max_new_tokens ({max_new_tokens}) of {context}"
    text += f", and {len(over)} do not fit at all ({list_task_ids(over)})" if over else f" ({list_task_ids(tight)})"
    advice = "completions are cut off there: lower rollout.max_new_tokens, drop long prompts, or take another model"
    severity = Severity.PROBLEM if over else Severity.WARNING
    return Finding("prompt_length", severity, text, advice, over or tight, numbers)


def check_solvability(rates: dict[str, float]) -> Finding:
    """Check how often the tasks are solved: groups in which all or none succeed teach nothing. `rates` by task."""
    bars = [0] * 10
    for rate in rates.values():
        bars[min(int(rate * 10), 9)] += 1
    never, always = sum(rate == 0 for rate in rates.values()), sum(rate == 1 for rate in rates.values())
    between = 1 - (never + always) / len(rates)
    mean = math.fsum(rates.values()) / len(rates)
    text = (
        f"{len(rates)} tasks, solved {mean:.0%} of the time: {never} never, {always} always, {between:.0%} in between"
    )
    numbers = {"histogram": bars, "never": never, "always": always, "mean": mean}
    if between >= 0.2:
        return passed_check("solvability", text, **numbers)
    advice = "tasks that are never or always solved teach little: take easier or harder ones, or a better start"
    severity = Severity.PROBLEM if between < 0.02 else Severity.WARNING
    return Finding("solvability", severity, text, advice, [], numbers)
