"""Components that run files choose by name: the sections in the packages `builtin` of the layers above.

Every module of those packages is searched, so that a new component is one file; none of them may import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from rollmill.config.environments import EnvironmentSection
from rollmill.config.operators import OperatorSection
from rollmill.config.samplers import SamplerSection
from rollmill.config.section import component_sections, section_union
from rollmill.config.task_operators import TaskOperatorSection
from rollmill.config.tools import ToolSection
from rollmill.config.trackers import TrackerSection
from rollmill.config.workflows import LiveRequestsWorkflow, SingleTurnWorkflow, WorkflowSection

if TYPE_CHECKING:
    EnvironmentConfig = EnvironmentSection
    OperatorConfig = OperatorSection
    SamplerConfig = SamplerSection
    TaskOperatorConfig = TaskOperatorSection
    ToolConfig = ToolSection
    TrackerConfig = TrackerSection
    WorkflowConfig = WorkflowSection
else:
    EnvironmentConfig = section_union(
        component_sections("rollmill.rollout.environments.builtin", EnvironmentSection), kind="environment"
    )
    OperatorConfig = section_union(component_sections("rollmill.pipelines.builtin", OperatorSection), kind="pipeline")
    SamplerConfig = section_union(component_sections("rollmill.data.samplers.builtin", SamplerSection), kind="sampler")
    TaskOperatorConfig = section_union(
        component_sections("rollmill.data.operators.builtin", TaskOperatorSection), kind="task_operator"
    )
    ToolConfig = section_union(component_sections("rollmill.rollout.tools.builtin", ToolSection), kind="tool")
    TrackerConfig = section_union(component_sections("rollmill.trackers.builtin", TrackerSection), kind="tracker")
    WorkflowConfig = section_union(
        [SingleTurnWorkflow, *component_sections("rollmill.rollout.workflows", WorkflowSection), LiveRequestsWorkflow],
        kind="workflow",
    )


def workflow_by_name(name: str) -> WorkflowSection:
    """Returns the section of a workflow, built in or registered, with its defaults. Raises ValueError for others."""
    section: WorkflowSection = TypeAdapter(WorkflowConfig).validate_python(name)
    return section
