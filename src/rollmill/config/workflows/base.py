"""Base class of workflow sections."""

from __future__ import annotations

from typing import ClassVar

from rollmill.config.section import NamedSection


class WorkflowSection(NamedSection):
    """A workflow chosen by name; its other keys are its options."""

    uses_rewards: ClassVar[bool] = True  #: its rollouts are scored by `rewards`
    uses_environment: ClassVar[bool] = False
    uses_tools: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = True  #: otherwise an application makes the rollouts
    single_turn: ClassVar[bool] = False  #: one completion of the task's prompt and nothing else
    multi_step: ClassVar[bool] = False  #: a rollout may give several experiences
    parts: ClassVar[tuple[str, ...]] = ()  #: parameters of a user's function besides task and policy

    @property
    def judged(self) -> bool:
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
    def models(self) -> tuple[str, ...]:
        """Entries of `models` that the workflow gets because a key names them."""
        return ()

    def takes(self, part: str) -> bool:
        """Returns whether the workflow takes the parameter `part`, such as an entry of `models`."""
        return part in type(self).parts or "*" in type(self).parts or part in self.models
