"""On-policy self-distillation: the teacher is the policy itself with additional context.

L = 1/sum_i T_i sum_i sum_t D(pi(. | x, y_<t), teacher(. | x, c, y_<t)) over the policy's own completions y of prompt x

c is context that the policy does not get:
solution   the task's worked solution (SDFT, arXiv:2601.19897; OPSD, arXiv:2601.18734)
answer     the task's reference answer
success    another completion of the same group with a high enough reward (SDPO, arXiv:2601.20802)

The teacher's weights are an exponential average of the policy's (SDFT, SDPO), those of the start of the stage (OPSD),
or the policy's current ones. A completion without c does not count.
"""

from __future__ import annotations

import string
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rollmill.recipes.distillation import DistillationOptions


class SelfDistill(DistillationOptions):
    """On-policy self-distillation from the policy with privileged context: a solution, an answer or a success."""

    source: ClassVar[str] = "arXiv:2601.19897"

    name: Literal["self_distill"] = "self_distill"
    context: Literal["solution", "answer", "success"] = "solution"
    """Context of the teacher besides the prompt: the task's worked solution or answer, or another successful completion
    of the group."""
    template: str = "{prompt}\n\nThis is an example of a good response:\n{context}\n\nNow give a response of your own."
    """The teacher's prompt: `{prompt}` is the task's (of a chat its last message), `{context}` the additional
    context.
    """
    weights: Literal["ema", "initial", "current"] = "ema"
    """The teacher's weights: an exponential average of the policy's, those of the start of the stage, or the policy's
    current ones, which needs no second model."""
    rate: float = Field(0.05, gt=0, le=1)
    """Weight of the policy in the average after each training step. Only with weights `ema`."""
    success_at_least: float = 1.0
    """Minimum reward of a success. Only with context `success`."""

    @field_validator("template")
    @classmethod
    def _has_both_parts(cls, value: str) -> str:
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(value) if name is not None}
        except ValueError as error:
            raise ValueError(f"{error}; write {{{{ and }}}} for braces") from error
        if names != {"prompt", "context"}:
            raise ValueError("expected {prompt} and {context} in the text, and no other name in braces")
        return value
