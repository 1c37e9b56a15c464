"""Base class of task operators."""

from __future__ import annotations

from rollmill.config.section import NamedSection


class TaskOperatorSection(NamedSection):
    """An operator chosen by name; its other keys are its options."""
