"""What a tool is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

ToolCallable = Callable[[dict[str, Any]], Awaitable[str]]
"""Arguments to result. Raises ToolError with what the policy is told."""


class ToolError(Exception):
    """A call failed, for a reason that the policy is told."""


@dataclass(frozen=True, slots=True)
class Tool:
    """What a policy may call.

    Attributes:
        parameters: JSON schema of the arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    call: ToolCallable

    @property
    def message(self) -> dict[str, Any]:
        """Its description in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}
