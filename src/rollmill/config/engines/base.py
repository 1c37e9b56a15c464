"""Base class of inference engines."""

from __future__ import annotations

from rollmill.config.section import NamedSection


class EngineSection(NamedSection):
    """An engine chosen by name; its other keys are its options."""
