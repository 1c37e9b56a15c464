"""`rewards`: scoring of completions. Each entry is one part; the reward is the weighted sum of the parts.

Every module of this package is searched for rewards: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.rewards.base import RewardSection
from rollmill.config.section import find_sections, section_union

if TYPE_CHECKING:
    RewardConfig = RewardSection
else:
    RewardConfig = section_union(find_sections(__name__, __path__, RewardSection))
