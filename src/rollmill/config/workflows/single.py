"""Single-turn workflows."""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.workflows.base import WorkflowSection


class SingleTurnWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored by `rewards`."""

    single_turn: ClassVar[bool] = True

    name: Literal["single_turn"] = "single_turn"
