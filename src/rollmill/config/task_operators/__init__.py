"""`taskset.pipeline`: operators on tasks when they are loaded.

Every module of this package is searched for operators: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.section import find_sections, section_union
from rollmill.config.task_operators.built_in import TaskOperatorSection

if TYPE_CHECKING:
    TaskOperatorConfig = TaskOperatorSection
else:
    TaskOperatorConfig = section_union(find_sections(__name__, __path__, TaskOperatorSection), kind="task_operator")
