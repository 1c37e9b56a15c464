"""Workflows that run an external program."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class ProgramWorkflow(WorkflowSection):
    """Starts a program once per rollout that calls the policy through an OpenAI-compatible endpoint (extra `serve`).

    The environment variables OPENAI_BASE_URL and OPENAI_API_KEY are set as OpenAI clients expect. The task is passed as
    JSON on stdin and in ROLLMILL_TASK. The program's output is its answer.
    """

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.program:ProgramRunner"
    name: Literal["program"] = "program"
    command: list[str] = Field(min_length=1)
    """The program and its arguments; `python` is the Python that runs rollmill."""
    folder: Path = Path()
    """Working directory of the program."""
    environment: dict[str, str] = {}
    """Environment variables of the program, in addition to those of this process."""
    time_limit_s: float = Field(300.0, gt=0)
    """Timeout of the program; the rollout then fails."""
    at_once: int = Field(8, ge=1)
    """Maximum number of concurrent programs."""
    rewarded_by: Literal["rewards", "feedback"] = "rewards"
    """Source of the reward: `rewards`, which score the program's output, or `feedback` posted to /feedback (by the
    program itself, or a verifier it starts)."""
    own_sampling: bool = True
    """Whether the program may choose temperature, top_p, top_k and min_p; false: always those of `rollout`. Greedy
    replies are not trained on."""
    show_answer: bool = False
    """Include the task's answer in the task passed to the program."""

    @property
    def judged(self) -> bool:
        """True if `rewards` score the program's output."""
        return self.rewarded_by == "rewards"

    @property
    def forces_sampling(self) -> bool:
        """See WorkflowSection.forces_sampling."""
        return not self.own_sampling
