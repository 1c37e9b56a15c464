"""Worked examples in front of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rollmill.config.workflows import FewShot
from rollmill.core.errors import WorkflowError
from rollmill.core.types import Task
from rollmill.explorer.policy import Policy
from rollmill.explorer.workflow import Answer, RolloutJudge

Example = tuple[str | Sequence[Any], str]
"""A prompt, as a task has it, and a response."""


async def few_shot(config: FewShot, task: Task, policy: Policy, judge: RolloutJudge, examples: list[Task]) -> Answer:
    """What the rewards say of the completion."""
    chosen = choose(config, task, examples)
    if isinstance(task.prompt, str):
        shown = [f"{prompt}{response}{config.separator}" for prompt, response in chosen]
        return await judge(await policy.complete("".join([*map(str, shown), task.prompt])))
    system = [each for each in task.prompt if each["role"] == "system"]
    turns = [turn for prompt, response in chosen for turn in _turns(prompt, response)]
    return await judge(await policy.chat([*system, *turns, *(e for e in task.prompt if e["role"] != "system")]))


def choose(config: FewShot, task: Task, examples: list[Task]) -> list[Example]:
    """The examples of a task, the same each time. Raises WorkflowError where there are too few."""
    found: list[Example] = [(each.prompt, each.response or "") for each in examples]
    where = "tasks of the training taskset with a worked solution, besides the task itself"
    if config.examples:
        found = [(each.prompt, each.response) for each in config.examples if each.prompt != _asked(task)]
        where = "`workflow.examples` besides the task itself"
    else:
        found = [each for each in found if isinstance(each[0], str) == isinstance(task.prompt, str)]
    if len(found) < config.count:
        raise WorkflowError(
            f"workflow `few_shot` shows {config.count} examples, and there are {len(found)} for task `{task.id}`: "
            f"{where}; lower workflow.count, or give taskset.response_template or workflow.examples"
        )
    if config.choose == "first":
        return found[: config.count]
    return random.Random(f"{config.seed}/{task.id}").sample(found, config.count)


def _turns(prompt: str | Sequence[Any], response: str) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*(each for each in asked if each["role"] != "system"), {"role": "assistant", "content": response}]


def _asked(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
