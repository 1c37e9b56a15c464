"""Base class of `tools`, which a policy may call in a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from rollmill.config.section import NamedSection

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout


class ToolSection(NamedSection):
    """A tool chosen by name: its options, and how it is opened. A stage works with a copy."""

    many: ClassVar[bool] = False
    """It stands for several tools, which have their own names."""
    uses_container: ClassVar[bool] = False
    """It works in the rollout's container."""

    called: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Tool name shown to the policy. Default: `name`. The tools of `mcp` have the server's names, with this and `_` in
    front."""
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

    def setup(self, pool: ToolPool) -> None:
        """Make what all rollouts of a stage share. Raises ConfigError if it lacks a library."""

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool | Sequence[Tool]:
        """Returns the tool, or several, for one rollout, which closes the stack at its end."""
        raise NotImplementedError
