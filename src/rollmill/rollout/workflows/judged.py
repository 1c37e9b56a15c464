"""Workflow `judged`: another model rates the policy's reply."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.workflows import WorkflowSection
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rollout.policy import Policy
    from rollmill.rollout.workflow import WorkflowResult

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class JudgedWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored from 0 to 1 by a model of `models`."""

    uses_rewards: ClassVar[bool] = False

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
    def models(self) -> dict[str, str]:
        return {"by": self.by}

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> Self:
        if "{response}" not in self.question:
            raise ValueError("question: the place {response} is missing")
        return self

    async def solve(self, task: Task, policy: Policy, **models: Any) -> WorkflowResult:
        """Return the last number of the judging model's reply, scaled to 0..1; None if it is missing or off the
        scale."""
        from rollmill.data.content_parts import content_text

        if isinstance(task.prompt, str):
            reply, prompt = await policy.complete(task.prompt), task.prompt
        else:
            reply, prompt = await policy.chat(list(task.prompt)), content_text(task.prompt[-1]["content"])
        places = {
            "prompt": prompt,
            "response": reply.completion.answer,
            "answer": str(task.answer),
            "scale": f"{self.scale:g}",
        }
        question = re.sub(r"\{(prompt|response|answer|scale)\}", lambda found: places[found[1]], self.question)
        verdict = await models[self.by].chat([{"role": "user", "content": question}])
        numbers = _NUMBER.findall(verdict.completion.answer)
        score = float(numbers[-1]) if numbers else -1.0
        return score / self.scale if 0 <= score <= self.scale else None
