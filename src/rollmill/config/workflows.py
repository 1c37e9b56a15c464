"""`workflow`: the rollout procedure of a task. The base class, the roles of a workflow, and the two workflows that have
no procedure of their own; the others stand in `rollmill.rollout.workflows`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from rollmill.config.section import NamedSection, Section

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig
    from rollmill.rollout.resources import WorkflowResources


class WorkflowSection(NamedSection):
    """A workflow chosen by name: its options, and `async def solve(self, task, policy, ...)`.

    `solve` gets its further parameters by name, as a user's function does (`rollmill.workflow`), and returns what that
    returns. A stage works with a copy of the section.
    """

    uses_rewards: ClassVar[bool] = True  #: its rollouts are scored by `rewards`
    uses_environment: ClassVar[bool] = False
    uses_tools: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = True  #: otherwise an application makes the rollouts
    single_turn: ClassVar[bool] = False  #: one completion of the task's prompt and nothing else
    multi_step: ClassVar[bool] = False  #: a rollout may give several experiences
    plain_keys: ClassVar[tuple[str, ...]] = ()  #: keys that count in plain prompts only, not in chats
    parts: ClassVar[tuple[str, ...]] = ()  #: parameters of a user's function besides task and policy

    @property
    def scored_by_rewards(self) -> bool:
        """True if the workflow uses `rewards`, with these options."""
        return type(self).uses_rewards

    @property
    def needs_rewards(self) -> bool:
        """True if the workflow requires `rewards`, whatever the algorithm."""
        return False

    @property
    def early_rewards(self) -> str | None:
        """The key because of which the workflow wants rewards before the rollout ends; None if it does not."""
        return None

    @property
    def forces_sampling(self) -> bool:
        """True if requests to the endpoint always have the sampling parameters of `rollout`."""
        return False

    @property
    def models(self) -> dict[str, str]:
        """Entries of `models` that the workflow gets because a key names them, by that key."""
        return {}

    @property
    def may_have_roles(self) -> bool:
        """True if the workflow may call `policy.role`: those of users."""
        return type(self).function is not None

    def takes(self, part: str) -> bool:
        """Returns whether the workflow takes the parameter `part`, such as an entry of `models`."""
        return part in type(self).parts or "*" in type(self).parts or part in self.models.values()

    def setup(self, resources: WorkflowResources) -> None:
        """Make what the rollouts of a stage share."""

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        """Yields the keys that cannot have their value in this stage, each with the problem and a remedy."""
        return iter(())


class RoleConfig(Section):
    """A role that the policy plays in a workflow, which calls `policy.role(NAME)`."""

    learn: bool = True
    """Train the tokens that the policy generates in this role. Otherwise its rewards are only logged."""


class CompactionConfig(Section):
    """Context compaction: the policy summarises a conversation that has become long, and goes on from the summary.

    What came before, the summary included, and what comes after are trajectories of one rollout, each with the prompt
    that the policy saw.
    """

    at_tokens: int = Field(ge=1)
    """Summarise before the next turn once the prompt and the policy's last turn have this many tokens. Leave room below
    the model's context for what the policy is told next, the instruction and the summary."""
    instruction: str = (
        "The conversation is about to be cut. Write down all that is needed to go on without it: what was asked, what "
        "was found out and done so far, and what comes next."
    )
    """Text that asks the policy for the summary."""
    opening: str = "Notes on what was done so far:\n{summary}"
    """Text with which the conversation goes on after its first messages, with the placeholder {summary}."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest summary; null: that of `rollout`."""
    learn: bool = True
    """Train the summaries, too."""

    @field_validator("opening")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{summary}" not in value:
            raise ValueError("the place {summary} is missing")
        return value


class SingleTurnWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored by `rewards`."""

    single_turn: ClassVar[bool] = True

    name: Literal["single_turn"] = "single_turn"


class LiveRequestsWorkflow(WorkflowSection):
    """Sessions of applications with the model that `rollmill serve RUN.yaml --train` serves, rewarded by feedback."""

    needs_extra = ("serve", "uvicorn")

    uses_rewards: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = False
    single_turn: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["live_requests"] = "live_requests"
    group: Literal["session", "prompt"] = "session"
    """Group of sessions that are compared. `session`: every session is its own group, for algorithms that compare with
    the whole batch. `prompt`: `rollout.group_size` sessions with the same first prompt."""
    pending: int = Field(4096, ge=1)
    """Maximum sessions that wait for others with the same prompt; beyond that the oldest are dropped."""

    def unused_keys(self) -> dict[str, str]:
        return {"pending": "not honoured with group `session`; it is with `prompt`"} if self.group == "session" else {}
