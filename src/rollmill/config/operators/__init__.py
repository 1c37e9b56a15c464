"""`pipeline`: operators between explorer and buffer, in order. Each changes, drops or adds experiences.

Every module of this package is searched for operators: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.operators.base import OperatorSection
from rollmill.config.section import find_sections, section_union

if TYPE_CHECKING:
    OperatorConfig = OperatorSection
else:
    OperatorConfig = section_union(find_sections(__name__, __path__, OperatorSection), kind="pipeline")
