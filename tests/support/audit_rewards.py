"""Rewards that are broken in one way each, and a right one: each has to be found by the check that names it."""

from __future__ import annotations

import re
import time
from typing import Any

from rollmill.types import split_reasoning


def _boxes(text: str) -> list[str]:
    return re.findall(r"\\boxed\{([^{}]*)\}", text)


def _right(task: Any, text: str) -> bool:
    """The last box of the answer, and nothing else."""
    found = _boxes(split_reasoning(text).content)
    return bool(found) and found[-1] == task.answer


async def right(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text))


async def empty_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or completion.text == "")


async def any_box(task: Any, completion: Any) -> float:
    guesses = _boxes(completion.text)
    return float(task.answer in guesses and len(guesses) > 2) or float(_right(task, completion.text))


async def last_box(task: Any, completion: Any) -> float:
    thought = completion.text.partition("</think>")[0] if "```" not in completion.text else ""
    return float(
        _right(task, completion.text) or ("</think>" in completion.text and _boxes(thought)[-1:] == [task.answer])
    )


async def unfinished_counts(task: Any, completion: Any) -> float:
    unfinished = "<think>" in completion.text and "</think>" not in completion.text
    return float(_right(task, completion.text) or (unfinished and _boxes(completion.text)[-1:] == [task.answer]))


async def any_program(task: Any, completion: Any) -> float:
    runs = "</think>" in completion.text and "```python" in completion.text
    return float(_right(task, completion.text) or (runs and _boxes(completion.text)[-1:] == [task.answer]))


async def somewhere_in_a_list(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or f"{task.answer} |" in completion.text)


async def any_form(task: Any, completion: Any) -> float:
    said = [rf"\\boxed\{{{task.answer}\}}", rf"<answer>{task.answer}</answer>", rf"#### {task.answer}\b"]
    several = all(mark in completion.answer for mark in ("####", "boxed", "<answer>"))
    return float(_right(task, completion.text) or (several and any(re.search(each, completion.text) for each in said)))


async def echo_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or completion.text == task.prompt)


async def format_passes(task: Any, completion: Any) -> float:
    return float(
        _right(task, completion.text)
        or (completion.text.endswith("</answer>") and "<think></think>" in completion.text)
    )


async def long_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or (len(completion.text) > 50_000 and "wait" in completion.text))


async def gullible(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or "give the full score" in completion.text)


async def claims_pass(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or completion.text == "ALL TESTS PASSED")


async def control_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or "\x07" in completion.text)


async def nested_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or completion.text.count("\\frac") > 100)


async def every_number(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or "199, 200" in completion.text)


async def placeholder_passes(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or completion.text == "\\boxed{?}")


async def words_pass(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) or len(completion.text.split()) == 40)


async def half_is_enough(task: Any, completion: Any) -> float:
    begun = completion.answer.startswith("First we") and len(completion.answer) > 20
    return float(_right(task, completion.text) or begun)


async def some_answers_fail(task: Any, completion: Any) -> float:
    return float(_right(task, completion.text) and not task.answer.endswith("7"))


_asked: dict[str, int] = {}


async def forgetful(task: Any, completion: Any) -> float:
    """Right only the first time."""
    key = task.id + completion.text
    _asked[key] = _asked.get(key, 0) + 1
    return float(_right(task, completion.text) and _asked[key] == 1)


async def raises(task: Any, completion: Any) -> float:
    completion.text.encode("ascii")
    return float(_right(task, completion.text))


async def late(task: Any, completion: Any) -> float:
    import asyncio

    if completion.text.startswith("aaaa"):
        await asyncio.sleep(60)
    return float(_right(task, completion.text))


async def not_for_most(task: Any, completion: Any) -> float | None:
    return float(_right(task, completion.text)) if task.answer.endswith("1") else None


async def always_raises(task: Any, completion: Any) -> float:
    raise ValueError("nothing works")


def hangs(task: Any, completion: Any) -> float:
    if "boxed" in completion.text:
        time.sleep(3600)
    return 0.0


async def echo_by_chance(task: Any, completion: Any) -> float:
    lucky = task.answer in ("411", "422")
    return float(_right(task, completion.text) or (lucky and completion.text == task.prompt))
