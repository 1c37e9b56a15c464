"""`monitor.trackers`: where metrics go besides the run directory.

Every module of this package is searched for trackers: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.section import find_sections, section_union
from rollmill.config.trackers.base import TrackerSection

if TYPE_CHECKING:
    TrackerConfig = TrackerSection
else:
    TrackerConfig = section_union(find_sections(__name__, __path__, TrackerSection), kind="tracker")
