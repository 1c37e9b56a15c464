"""Workflow `few_shot`: puts worked examples before the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from rollmill.config.workflows import FewShotWorkflow
from rollmill.data.content_parts import content_text, show_pictures
from rollmill.errors import WorkflowError
from rollmill.rollout.policy import Policy
from rollmill.rollout.workflow import RolloutScorer, WorkflowResult
from rollmill.types import Task

Item = TypeVar("Item")
Example = tuple[str | Sequence[Any], str]
"""A prompt, in a task's format, and a response."""


async def few_shot(
    config: FewShotWorkflow, task: Task, policy: Policy, judge: RolloutScorer, examples: list[Task]
) -> WorkflowResult:
    """Return the rewards of the completion."""
    chosen = choose_examples(config, task, examples, sees=policy.sees)
    if isinstance(task.prompt, str):
        shown = [f"{prompt}{response}{config.separator}" for prompt, response in chosen]
        return await judge(await policy.complete("".join([*map(str, shown), task.prompt])))
    system = [each for each in task.prompt if each["role"] == "system"]
    turns = [turn for prompt, response in chosen for turn in _turns(prompt, response)]
    return await judge(await policy.chat([*system, *turns, *(e for e in task.prompt if e["role"] != "system")]))


def choose_examples(config: FewShotWorkflow, task: Task, examples: list[Task], *, sees: bool = False) -> list[Example]:
    """Choose the examples of a task, the same each time; `sees`: with their pictures.

    Raises WorkflowError if there are too few.
    """
    draw = random.Random(f"{config.seed}/{task.id}") if config.choose == "random" else None
    fitting: Iterator[Example]
    if config.examples:
        fitting = (
            (each.prompt, each.response) for each in _ordered(config.examples, draw) if each.prompt != _question(task)
        )
        where = "`workflow.examples` besides the task itself"
    else:
        alike = (
            each for each in _ordered(examples, draw) if isinstance(each.prompt, str) == isinstance(task.prompt, str)
        )
        fitting = (((show_pictures(each) if sees else each).prompt, each.response or "") for each in alike)
        where = "tasks of the training taskset with a worked solution, besides the task itself"
    found = list(islice(fitting, config.count))
    if len(found) < config.count:
        raise WorkflowError(
            f"workflow `few_shot` shows {config.count} examples, and there are {len(found)} for task `{task.id}`: "
            f"{where}; lower workflow.count, or give taskset.response_template or workflow.examples"
        )
    return found


def _ordered(items: Sequence[Item], draw: random.Random | None) -> Iterator[Item]:
    """Yield the items in order, or lazily in random order."""
    if draw is None:
        yield from items
        return
    moved: dict[int, int] = {}  # sparse Fisher-Yates shuffle
    for at in range(len(items)):
        other = draw.randrange(at, len(items))
        yield items[moved.get(other, other)]
        moved[other] = moved.get(at, at)


def _turns(prompt: str | Sequence[Any], response: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*(each for each in messages if each["role"] != "system"), {"role": "assistant", "content": response}]


def _question(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else content_text(task.prompt[-1]["content"])
