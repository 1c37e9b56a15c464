"""`tools`: tools that a policy may call in a rollout.

Every module of this package is searched for tools: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.section import find_sections, section_union
from rollmill.config.tools.base import ToolSection

if TYPE_CHECKING:
    ToolConfig = ToolSection
else:
    ToolConfig = section_union(find_sections(__name__, __path__, ToolSection), kind="tool")
