"""Base class of tools."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollmill.config.section import NamedSection


class ToolSection(NamedSection):
    """A tool chosen by name; its other keys are its options."""

    called: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Tool name shown to the policy. Default: `name`."""
    description: str | None = None
    """Description shown to the policy. Default: the tool's own."""
    time_limit_s: float = Field(10.0, gt=0)
    """Timeout of one call, reported to the policy."""
    result_chars: int = Field(4000, ge=20)
    """Maximum length of a result in characters; longer results are truncated in the middle."""

    @property
    def policy_name(self) -> str:
        """Tool name shown to the policy."""
        return self.called or self.name

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the tool itself."""
        common = ToolSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}
