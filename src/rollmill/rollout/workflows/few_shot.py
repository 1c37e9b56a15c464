"""Workflow `few_shot`: puts worked examples before the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rollmill.config.section import Section
from rollmill.config.workflows import WorkflowSection
from rollmill.errors import WorkflowError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rollout.policy import Policy
    from rollmill.rollout.workflow import RolloutScorer, WorkflowResult

Item = TypeVar("Item")
Example = tuple[str | Sequence[Any], str]
"""A prompt, in a task's format, and a response."""


class FewShotExample(Section):
    """A worked example."""

    prompt: str
    """Prompt of the example."""
    response: str
    """Response of the example."""


class FewShotWorkflow(WorkflowSection):
    """One completion of the task's prompt after worked examples, scored by `rewards`."""

    name: Literal["few_shot"] = "few_shot"
    examples: list[FewShotExample] = []
    """The examples. Default: tasks of the training taskset with a worked solution, except the task itself."""
    count: int = Field(3, ge=1)
    """Number of examples to show."""
    choose: Literal["random", "first"] = "random"
    """`random` draws them for each task, the same for all of its rollouts; `first` shows the first ones."""
    seed: int = 0
    """Seed of the draw. Only with `choose: random`."""
    separator: str = "\n\n"
    """Separator between examples of plain prompts (no chat)."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.examples and self.count > len(self.examples):
            raise ValueError(f"count: {self.count} are shown, and examples has {len(self.examples)}; lower it")
        return self

    def takes(self, part: str) -> bool:
        return part == "examples" and not self.examples

    def unused_keys(self) -> dict[str, str]:
        return {"seed": "not honoured with choose `first`; it is with `random`"} if self.choose == "first" else {}

    async def solve(self, task: Task, policy: Policy, judge: RolloutScorer, examples: list[Task]) -> WorkflowResult:
        """Return the rewards of the completion."""
        chosen = self.choose_examples(task, examples, sees=policy.sees)
        if isinstance(task.prompt, str):
            shown = [f"{prompt}{response}{self.separator}" for prompt, response in chosen]
            return await judge(await policy.complete("".join([*shown, task.prompt])))
        system = [each for each in task.prompt if each["role"] == "system"]
        turns = [turn for prompt, response in chosen for turn in _turns(prompt, response)]
        return await judge(await policy.chat([*system, *turns, *(e for e in task.prompt if e["role"] != "system")]))

    def choose_examples(self, task: Task, examples: list[Task], *, sees: bool = False) -> list[Example]:
        """Choose the examples of a task, the same each time; `sees`: with their pictures.

        Raises WorkflowError if there are too few.
        """
        from rollmill.data.content_parts import content_text, show_pictures

        draw = random.Random(f"{self.seed}/{task.id}") if self.choose == "random" else None
        fitting: Iterator[Example]
        if self.examples:
            question = task.prompt if isinstance(task.prompt, str) else content_text(task.prompt[-1]["content"])
            others = (each for each in _ordered(self.examples, draw) if each.prompt != question)
            fitting = ((each.prompt, each.response) for each in others)
            where = "`workflow.examples` besides the task itself"
        else:
            plain = isinstance(task.prompt, str)
            alike = (each for each in _ordered(examples, draw) if isinstance(each.prompt, str) == plain)
            fitting = (((show_pictures(each) if sees else each).prompt, each.response or "") for each in alike)
            where = "tasks of the training taskset with a worked solution, besides the task itself"
        found = list(islice(fitting, self.count))
        if len(found) < self.count:
            raise WorkflowError(
                f"workflow `few_shot` shows {self.count} examples, and there are {len(found)} for task `{task.id}`: "
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
