"""Workflows that are programs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class ProgramWorkflow(WorkflowSection):
    """A program that uses the policy through an OpenAI-compatible endpoint, started once per rollout (extra `serve`).

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, as OpenAI's clients expect, and the task as JSON on
    stdin and in ROLLMILL_TASK. What it prints is its answer.
    """

    multi_step: ClassVar[bool] = True

    name: Literal["program"] = "program"
    command: list[str] = Field(min_length=1)
    """The program and its arguments; `python` is the Python that runs rollmill."""
    folder: Path = Path()
    """Where it is started."""
    environment: dict[str, str] = {}
    """Environment variables of the program, besides those of this process."""
    time_limit_s: float = Field(300.0, gt=0)
    """Longest run of the program; past it the rollout has failed."""
    at_once: int = Field(8, ge=1)
    """How many programs run at the same time."""
    rewarded_by: Literal["rewards", "feedback"] = "rewards"
    """Who says what a rollout is worth: `rewards`, which judge what the program printed, or whoever posts to
    /feedback (the program itself, or a verifier it starts)."""
    own_sampling: bool = True
    """Whether the program may choose temperature, top_p, top_k and min_p; false: always those of `rollout`. Replies
    that it wants greedy are not learned from."""
    show_answer: bool = False
    """Put the task's answer into what the program is told."""

    @property
    def judged(self) -> bool:
        """Whether `rewards` judge what it printed."""
        return self.rewarded_by == "rewards"
