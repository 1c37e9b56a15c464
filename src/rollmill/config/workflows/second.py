"""Workflows with few-shot examples, reflection, voting, or scoring by a model."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import regex
from pydantic import Field, model_validator

from rollmill.config.section import Section
from rollmill.config.workflows.base import WorkflowSection


class FewShotExample(Section):
    """A worked example."""

    prompt: str
    """Prompt of the example."""
    response: str
    """Response of the example."""


class FewShotWorkflow(WorkflowSection):
    """One completion of the task's prompt after worked examples, scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.few_shot:few_shot"
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
        """See WorkflowSection.takes."""
        return part == "examples" and not self.examples

    def unused_keys(self) -> dict[str, str]:
        """See Section.unused_keys."""
        return {"seed": "not honoured with choose `first`; it is with `random`"} if self.choose == "first" else {}


class ReflectionWorkflow(WorkflowSection):
    """The policy answers; after a wrong answer it is asked to reflect and to answer again."""

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.reflection:reflection"
    name: Literal["reflection"] = "reflection"
    retries: int = Field(1, ge=1)
    """Maximum number of further answers."""
    critic: Literal["rewards", "self"] = "rewards"
    """Judge of answers: `rewards` (wrong below `threshold`), or the policy itself in a separate turn."""
    threshold: float = 1.0
    """Minimum reward of a right answer. Only with `critic: rewards`."""
    check: str = "Is this answer right? Begin with yes or no, then say why."
    """Question to the policy about its own answer. Only with `critic: self`."""
    retry: str = "That is not right. Think about what went wrong, then give a better answer."
    """Message to the policy before it answers again."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the last answer's reward per retry used; the part `retries` logs the amount it subtracts."""

    @property
    def needs_rewards(self) -> bool:
        """See WorkflowSection.needs_rewards."""
        return self.critic == "rewards"

    @property
    def early_rewards(self) -> str | None:
        """See WorkflowSection.early_rewards."""
        return "critic: rewards" if self.critic == "rewards" else "discount" if self.discount < 1 else None

    def unused_keys(self) -> dict[str, str]:
        """See Section.unused_keys."""
        unused, other = ("check", "self") if self.critic == "rewards" else ("threshold", "rewards")
        return {unused: f"not honoured with critic `{self.critic}`; it is with `{other}`"}


class VoteWorkflow(WorkflowSection):
    """Several answers to the task, each a separate experience; the most frequent one wins (arXiv:2203.11171)."""

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.vote:vote"
    name: Literal["vote"] = "vote"
    samples: int = Field(8, ge=2)
    """Answers per rollout."""
    pattern: str | None = None
    """Regular expression of the answer in the text: its last match, or that match's first group. A text that takes
    longer than a second to search has no answer."""
    after: str | None = None
    """Alternative to `pattern`: the answer is the text after the last occurrence of this text. Default: the whole
    text."""
    reward: Literal["agreement", "winner"] = "agreement"
    """`agreement` needs no labels: each sample with the winning answer earns 1, others 0 (arXiv:2504.16084). `winner`:
    the winning answer is scored by `rewards`, and all samples share its reward."""

    @property
    def judged(self) -> bool:
        """See WorkflowSection.judged."""
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

    implementation = "rollmill.rollout.workflows.vote:model_judged"
    name: Literal["judged"] = "judged"
    by: str = "scorer"
    """Name of the scoring model in `models`."""
    question: str = (
        "Rate the response to the request from 0 (worst) to {scale} (best).\n\nRequest:\n{prompt}\n\n"
        "Response:\n{response}\n\nEnd with the number alone."
    )
    """Question to that model, with the placeholders {prompt}, {response}, {answer} and {scale}."""
    scale: float = Field(10.0, gt=0)
    """The best score, mapped to 1. The last number of the reply is the score; without one the rollout is rejected."""

    @property
    def models(self) -> tuple[str, ...]:
        """See WorkflowSection.models."""
        return (self.by,)

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> Self:
        if "{response}" not in self.question:
            raise ValueError("question: the place {response} is missing")
        return self
