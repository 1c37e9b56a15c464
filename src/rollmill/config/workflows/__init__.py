"""`workflow`: the rollout procedure of a task.

Every module of this package is searched for workflows: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.section import find_sections, section_union
from rollmill.config.workflows.base import WorkflowSection

if TYPE_CHECKING:
    WorkflowConfig = WorkflowSection
else:
    WorkflowConfig = section_union(find_sections(__name__, __path__, WorkflowSection), kind="workflow")
