"""`rewards`: scoring of completions. Each entry is one part, a section or a name; the reward is their weighted sum.

Every module of this package is searched for rewards: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from rollmill.config.rewards.base import RewardSection
from rollmill.config.section import expand_name, find_sections, section_union

if TYPE_CHECKING:
    RewardConfig = RewardSection
else:
    RewardConfig = Annotated[
        section_union(find_sections(__name__, __path__, RewardSection)), BeforeValidator(expand_name)
    ]
