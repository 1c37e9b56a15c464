"""Base class of trackers."""

from __future__ import annotations

from rollmill.config.section import NamedSection


class TrackerSection(NamedSection):
    """A tracker chosen by name; its other keys are its options."""
