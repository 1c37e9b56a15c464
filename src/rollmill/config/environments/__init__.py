"""`environment`: the environment that a workflow acts in.

Every module of this package is searched for environments: a new one is a section with a `name` and its
`implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.section import find_sections, section_union

if TYPE_CHECKING:
    EnvironmentConfig = EnvironmentSection
else:
    EnvironmentConfig = section_union(find_sections(__name__, __path__, EnvironmentSection), kind="environment")
