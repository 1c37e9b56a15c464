"""On-policy distillation: a teacher corrects the policy's own completions, token by token."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rollmill.config.algorithms.base import Aggregation, AlgorithmOptions


class DistillationOptions(AlgorithmOptions):
    """Options of algorithms in which a teacher corrects the policy's own completions, token by token."""

    needs_rewards = False
    recipe = "rollmill.algorithms.imitation_recipes:distillation"

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"] = "reverse_kl"
    """Divergence minimised at every position."""
    beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture. 0 is the forward KL, 1 the reverse KL. Only with `jsd` and
    `sampled_jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Softens both distributions. Not with `sampled` and `sampled_jsd`."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token terms; each has one denominator for the whole optimizer step."""

    def unused_keys(self) -> dict[str, str]:
        keys = {}
        if self.divergence not in ("jsd", "sampled_jsd"):
            keys["beta"] = f"not honoured by divergence `{self.divergence}`; it is by `jsd` and `sampled_jsd`"
        if self.divergence in ("sampled", "sampled_jsd"):
            keys["temperature"] = f"not honoured by divergence `{self.divergence}`; it is by the others"
        return keys

    def conflicts(self) -> dict[str, str]:
        if self.divergence != "sampled_jsd" or self.beta not in (0, 1):
            return {}
        text = "`sampled_jsd` needs a beta above 0 and below 1"
        return {"beta": f"{text}; change it, or use forward_kl (0) or reverse_kl (1)"}


class Distill(DistillationOptions):
    """On-policy distillation from a teacher with the same vocabulary. Rewards are reported but not used."""

    source = "arXiv:2306.13649"
    formula = """
    On-policy distillation: the policy rolls out, a teacher gives its next-token distribution at every position.

    L = 1/sum_i T_i sum_i sum_t D_t over the policy's own tokens; D_t a divergence between the next-token distributions:
    reverse_kl   KL(policy || teacher), mode-seeking
    forward_kl   KL(teacher || policy), mode-covering
    jsd          beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy
                 forward_kl at beta 0, reverse_kl at beta 1
    sampled      -sg(log teacher - log policy) log policy of the sampled token: reverse_kl's gradient from one token
    sampled_jsd  -sg((1 - beta) (log m - log policy)) log policy of the sampled token: jsd's gradient from one token
    """

    name: Literal["distill"] = "distill"
    teacher: Path | None = None
    """Checkpoint folder of the teacher; required."""

    @property
    def teacher_folder(self) -> Path | None:
        """The teacher's folder."""
        return self.teacher

    def conflicts(self) -> dict[str, str]:
        text = "which teacher? Give the folder of a checkpoint with the same vocabulary"
        return super().conflicts() | ({"teacher": text} if self.teacher is None else {})


class JSD(Distill):
    """On-policy distillation from a teacher by the generalised Jensen-Shannon divergence."""

    source = "arXiv:2306.13649"
    formula = """
    On-policy distillation by the generalised Jensen-Shannon divergence.

    L = 1/sum_i T_i sum_i sum_t D_t over the policy's own tokens; m = beta teacher + (1 - beta) policy
    jsd          D_t = beta KL(teacher || m) + (1 - beta) KL(policy || m); forward KL at beta 0, reverse KL at beta 1
    sampled_jsd  D_t = -sg((1 - beta) (log m - log policy)) log policy of the sampled token: the same gradient on
                 average

    The second is a policy gradient, like Trinity-RFT's `jsd`. That one uses the sampled token's share of the divergence
    as the reward, whose expected gradient is not the divergence's; with log m - log policy as the reward, it is.
    """

    name: Literal["jsd"] = "jsd"  # type: ignore[assignment]
    divergence: Literal["jsd", "sampled_jsd"] = "jsd"
    """Over the whole vocabulary, or for the sampled token only."""


class SelfDistill(DistillationOptions):
    """On-policy self-distillation from the policy with privileged context: a solution, an answer or a success."""

    recipe = "rollmill.algorithms.imitation_recipes:self_distillation"
    source = "arXiv:2601.19897"
    formula = """
    On-policy self-distillation: the teacher is the policy itself with additional context.

    L = 1/sum_i T_i sum_i sum_t D(pi(. | x, y_<t), teacher(. | x, c, y_<t))
    over the policy's own completions y of prompt x

    c is context that the policy does not get:
    solution   the task's worked solution (SDFT, arXiv:2601.19897; OPSD, arXiv:2601.18734)
    answer     the task's reference answer
    success    another completion of the same group with a high enough reward (SDPO, arXiv:2601.20802)

    The teacher's weights are an exponential average of the policy's (SDFT, SDPO), those of the start of the stage
    (OPSD), or the policy's current ones. A completion without c does not count.
    """

    name: Literal["self_distill"] = "self_distill"
    context: Literal["solution", "answer", "success"] = "solution"
    """Context of the teacher besides the prompt: the task's worked solution or answer, or another successful completion
    of the group, without its reasoning."""
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

    @property
    def self_teacher(self) -> SelfDistill:
        return self

    @property
    def keeps_teacher(self) -> bool:
        """True unless the policy's current weights teach."""
        return self.weights != "current"

    def unused_keys(self) -> dict[str, str]:
        keys = super().unused_keys()
        if self.weights != "ema":
            keys["rate"] = f"not honoured with weights `{self.weights}`; it is with `ema`"
        if self.context != "success":
            keys["success_at_least"] = f"not honoured with context `{self.context}`; it is with `success`"
        return keys
