"""`workflow`: the rollout procedure of a task."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.section import RegisteredUnion, expand_name
from rollmill.config.workflows.agents import ReActWorkflow, ToolWorkflow
from rollmill.config.workflows.base import WorkflowSection
from rollmill.config.workflows.environment import EnvironmentWorkflow
from rollmill.config.workflows.program import ProgramWorkflow
from rollmill.config.workflows.second import FewShotWorkflow, JudgedWorkflow, ReflectionWorkflow, VoteWorkflow
from rollmill.config.workflows.single import SingleTurnWorkflow
from rollmill.config.workflows.traffic import TrafficWorkflow
from rollmill.config.workflows.verifiers import VerifiersWorkflow

WorkflowConfig = Annotated[
    SerializeAsAny[
        Annotated[
            SingleTurnWorkflow
            | FewShotWorkflow
            | ToolWorkflow
            | ReActWorkflow
            | EnvironmentWorkflow
            | ReflectionWorkflow
            | VoteWorkflow
            | JudgedWorkflow
            | VerifiersWorkflow
            | ProgramWorkflow
            | TrafficWorkflow,
            Field(discriminator="name"),
        ]
    ],
    WrapValidator(RegisteredUnion("workflow")),
    BeforeValidator(expand_name),
]

__all__ = [
    "EnvironmentWorkflow",
    "FewShotWorkflow",
    "JudgedWorkflow",
    "ProgramWorkflow",
    "ReActWorkflow",
    "ReflectionWorkflow",
    "SingleTurnWorkflow",
    "ToolWorkflow",
    "TrafficWorkflow",
    "VerifiersWorkflow",
    "VoteWorkflow",
    "WorkflowConfig",
    "WorkflowSection",
]
