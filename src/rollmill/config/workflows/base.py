"""What workflows of run files have in common."""

from __future__ import annotations

from typing import ClassVar

from rollmill.config.section import NamedSection


class WorkflowSection(NamedSection):
    """A workflow chosen by name; its other keys are its options."""

    uses_rewards: ClassVar[bool] = True  #: what it returns is what `rewards` say
    uses_environment: ClassVar[bool] = False
    uses_tools: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = True  #: else rollouts come from outside
    single_turn: ClassVar[bool] = False  #: one completion of the task's prompt and nothing else
    multi_step: ClassVar[bool] = False  #: may make several experiences of a rollout
    parts: ClassVar[tuple[str, ...]] = ()  #: what a user's function takes besides task and policy

    @property
    def judged(self) -> bool:
        """Whether it asks `rewards`, with these options."""
        return type(self).uses_rewards

    @property
    def needs_rewards(self) -> bool:
        """Whether it is of no use without `rewards`, whatever the algorithm."""
        return False

    def takes(self, part: str) -> bool:
        """Whether it is given the part of this name, such as an entry of `models`."""
        return part in type(self).parts or "*" in type(self).parts
