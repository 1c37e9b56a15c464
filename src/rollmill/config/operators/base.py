"""What all operators of `pipeline` have in common."""

from __future__ import annotations

from rollmill.config.parts import Part


class OperatorSection(Part):
    """An operator chosen by name; its other keys are its options."""
