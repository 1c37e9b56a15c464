"""Tools and the toolbox of one rollout, with counters shared by all rollouts of a stage."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollmill.types import ToolCall

if TYPE_CHECKING:
    from rollmill.data.images import PictureFolder
    from rollmill.rollout.policy import Reply

ToolCallable = Callable[[dict[str, Any]], Awaitable[str | list[dict[str, Any]]]]
"""Maps arguments to a result: a text, or content parts with pictures. Raises ToolError with a message for the model."""


class ToolError(Exception):
    """A call failed; the message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a policy may call.

    Attributes:
        parameters: JSON schema of the arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    call: ToolCallable

    @property
    def message(self) -> dict[str, Any]:
        """The description in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


_HIDDEN = "(image, not shown)"
MALFORMED_CALLS, UNKNOWN_CALLS = "malformed", "unknown"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call, or its error if not `ok`."""

    content: str | list[dict[str, Any]]  #: a text; with pictures content parts, for a vision-language policy
    ok: bool

    @property
    def text(self) -> str:
        """The result without its pictures, which are named."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        return "\n".join(
            each if isinstance(each, str) else each["text"] if each["type"] == "text" else _HIDDEN for each in parts
        )


class Toolbox:
    """The workflow argument `tools`. Concurrent calls are allowed.

    Args:
        folder: keeps pictures of results, which are shown to the policy; None: it is no vision-language model.

    Attributes:
        calls, errors: number of calls and of failed ones in this rollout, malformed ones included.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        result_chars: dict[str, int],
        counters: dict[str, float],
        *,
        folder: PictureFolder | None = None,
    ) -> None:
        self._folder = folder
        self._tools = {tool.name: tool for tool in tools}
        self._result_chars, self._counters = result_chars, counters
        self.calls = self.errors = 0

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """Descriptions in OpenAI's format, for `policy.chat(..., tools=...)`."""
        return [tool.message for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """Names that the policy calls them by."""
        return list(self._tools)

    def schema(self, name: str) -> dict[str, Any]:
        """JSON schema of a tool's arguments; empty for an unknown one."""
        return self._tools[name].parameters if name in self._tools else {}

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Errors, unknown names included, are returned and counted."""
        self.calls += 1
        tool = self._tools.get(name)
        if tool is None:
            self.errors += 1
            self._count(UNKNOWN_CALLS)
            return ToolResult(f"Error: there is no tool `{name[:64]}`; there are {', '.join(self._tools)}", False)
        started = time.perf_counter()
        try:
            result = self._result(name, await tool.call(arguments))
        except ToolError as error:
            self.errors += 1
            self._count(f"{name}/errors")
            result = ToolResult(self._cut(name, f"Error: {error}"), False)
        self._count(f"{name}/calls")
        self._count(f"{name}/seconds", time.perf_counter() - started)
        return result

    async def answer(self, reply: Reply) -> list[dict[str, Any]]:
        """Run a turn's calls one after the other; return the result messages, none without calls.

        Errors of malformed calls become a user message, as they have no id.
        """
        from rollmill.data.renderer.call_formats import tool_result_message

        found = [tool_result_message(call, (await self.answered(call)).content) for call in reply.tool_calls]
        if reply.malformed:
            found.append({"role": "user", "content": self.malformed_message(reply.malformed)})
        return found

    async def answered(self, call: ToolCall) -> ToolResult:
        """Run a parsed call and return its result."""
        return await self.call(call.name, call.arguments)

    def malformed_message(self, malformed: Sequence[str]) -> str:
        """Count malformed calls, and build the policy's error message."""
        self.errors += len(malformed)
        self._count(MALFORMED_CALLS, len(malformed))
        return "Error: " + "; ".join(f"a call that cannot be read ({each})" for each in malformed)

    def _result(self, name: str, content: str | list[dict[str, Any]]) -> ToolResult:
        """The result of a call that has not failed. Raises ToolError if a picture cannot be read."""
        found = ToolResult(content, True)
        if isinstance(content, str) or self._folder is None:
            return ToolResult(self._cut(name, found.text), True)
        parts: list[dict[str, Any]] = []
        left = self._result_chars[name]  # for all texts together
        for part in content:
            if part["type"] == "text":
                parts.append({"type": "text", "text": self._cut(name, part["text"], max(left, 0))})
                left -= len(part["text"])
                continue
            try:
                parts.append({"type": "image", "image": asdict(self._folder.keep(part["image"], "the result"))})
            except ValueError as error:
                raise ToolError(f"its picture cannot be read: {error}") from error
        return ToolResult(parts, True)

    def _cut(self, name: str, text: str, most: int | None = None) -> str:
        """The text with at most `most` characters (default: of a whole result), and how many were left out."""
        from rollmill.rollout.environments.base import drop_surrogates

        text = drop_surrogates(text)
        most = self._result_chars[name] if most is None else most
        if len(text) <= most:
            return text
        left = most // 2
        return f"{text[:left]}\n... {len(text) - 2 * left} characters left out ...\n{text[len(text) - left :]}"

    def _count(self, key: str, number: float = 1.0) -> None:
        self._counters[key] = self._counters.get(key, 0.0) + number
