"""Workflows that show examples, ask again, or ask several times."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import regex
from pydantic import Field, model_validator

from rollmill.config.section import Section
from rollmill.config.workflows.base import WorkflowSection


class FewShotExample(Section):
    """A worked example."""

    prompt: str
    """What is asked."""
    response: str
    """How it is answered."""


class FewShotWorkflow(WorkflowSection):
    """One completion of the task's prompt behind worked examples, judged by `rewards`."""

    name: Literal["few_shot"] = "few_shot"
    examples: list[FewShotExample] = []
    """The examples. Default: tasks of the training taskset that have a worked solution; never the task itself."""
    count: int = Field(3, ge=1)
    """How many are shown."""
    choose: Literal["random", "first"] = "random"
    """`random` draws them for each task, the same for all of its rollouts; `first` shows the first ones."""
    seed: int = 0
    """What is drawn. Only with `choose: random`."""
    separator: str = "\n\n"
    """Between examples of plain prompts (no chat)."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.examples and self.count > len(self.examples):
            raise ValueError(f"count: {self.count} are shown, and examples has {len(self.examples)}; lower it")
        return self


class ReflectionWorkflow(WorkflowSection):
    """The policy answers; where the answer is wrong it is told so, thinks about it and answers again."""

    multi_step: ClassVar[bool] = True

    name: Literal["reflection"] = "reflection"
    retries: int = Field(1, ge=1)
    """How often it may answer again."""
    critic: Literal["rewards", "self"] = "rewards"
    """Who says that an answer is wrong: `rewards` (below `threshold`), or the policy itself in a turn of its own."""
    threshold: float = 1.0
    """Answers with at least this reward are right. Only with `critic: rewards`."""
    check: str = "Is this answer right? Begin with yes or no, then say why."
    """What the policy is asked about its own answer. Only with `critic: self`."""
    retry: str = "That is not right. Think about what went wrong, then give a better answer."
    """What it is told before it answers again."""
    discount: float = Field(1.0, gt=0, le=1)
    """What the reward of the last answer is multiplied by for each retry that it took; the part `retries` says how
    much that takes away."""

    @property
    def needs_rewards(self) -> bool:
        """See WorkflowSection."""
        return self.critic == "rewards"


class VoteWorkflow(WorkflowSection):
    """Several answers to the task, each an experience of its own; the most frequent one wins (arXiv:2203.11171)."""

    multi_step: ClassVar[bool] = True

    name: Literal["vote"] = "vote"
    samples: int = Field(8, ge=2)
    """Answers per rollout."""
    pattern: str | None = None
    """Regular expression of the answer in the text: its last match, or the first group of it. A text that it takes
    longer than a second for has no answer."""
    after: str | None = None
    """Instead of a pattern: the answer is what follows the last occurrence of this text. Default: all of the text."""
    reward: Literal["agreement", "winner"] = "agreement"
    """`agreement` needs no labels: each sample that gives the winning answer earns 1, others 0 (arXiv:2504.16084).
    `winner`: the winning answer is judged by `rewards`, and all samples share what it earns."""

    @property
    def judged(self) -> bool:
        """See WorkflowSection."""
        return self.reward == "winner"

    @model_validator(mode="after")
    def _one_extraction(self) -> Self:
        if self.pattern is not None and self.after is not None:
            raise ValueError("pattern and after both say where the answer is; give one of them")
        try:
            regex.compile(self.pattern or "")
        except (regex.error, RecursionError) as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error
        return self


class JudgedWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored from 0 to 1 by a model of `models`."""

    uses_rewards: ClassVar[bool] = False

    name: Literal["judged"] = "judged"
    by: str = "scorer"
    """Which of the `models` scores."""
    question: str = (
        "Rate the response to the request from 0 (worst) to {scale} (best).\n\nRequest:\n{prompt}\n\n"
        "Response:\n{response}\n\nEnd with the number alone."
    )
    """What it is asked, with the places {prompt}, {response}, {answer} and {scale}."""
    scale: float = Field(10.0, gt=0)
    """The best score; it becomes 1. The last number of the reply counts; without one the rollout is rejected."""

    def takes(self, part: str) -> bool:
        """See WorkflowSection."""
        return part == self.by

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> Self:
        if "{response}" not in self.question:
            raise ValueError("question: the place {response} is missing")
        return self
