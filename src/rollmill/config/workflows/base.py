"""What workflows of run files have in common."""

from __future__ import annotations

from typing import ClassVar

from rollmill.config.parts import Part


class WorkflowSection(Part):
    """A workflow chosen by name; its other keys are its options."""

    asks_judge: ClassVar[bool] = True  #: what it returns is what `rewards` say
    uses_environment: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = True  #: else rollouts come from outside
    single_turn: ClassVar[bool] = False  #: one completion of the task's prompt and nothing else
    multi_step: ClassVar[bool] = False  #: may make several experiences of a rollout
    parts: ClassVar[tuple[str, ...]] = ()  #: what a user's function takes besides task and policy
