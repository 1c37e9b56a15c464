"""Tools for chat templates that know of none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmill.explorer.tools.formats import ToolCall, as_response, describe, render


def shown_tools(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the tokenizer's chat template takes them.

    Where it knows of no tools, they are described in the system message, and calls and results stand in the text.
    """
    if "tools" in str(tokenizer.chat_template):
        return messages, tools
    found = [_as_text(message) for message in messages]
    if tools:
        first = found[:1] if found[:1] and found[0]["role"] == "system" else [{"role": "system", "content": ""}]
        rest = found[len(first) :] if found[:1] == first else found
        text = f"{first[0]['content']}\n\n{describe(tools)}".lstrip()
        found = [{"role": "system", "content": text}, *rest]
    return found, None


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": as_response(message["content"])}
    if "tool_calls" in message:
        text = _calls_as_text(message["tool_calls"])
        return {"role": message["role"], "content": f"{message['content']}\n{text}".lstrip("\n")}
    return message


def _calls_as_text(calls: Sequence[dict[str, Any]]) -> str:
    """Sorted, so that a call which comes back with its arguments in another order is the same text."""
    functions = [each["function"] for each in calls]
    arguments = [json.loads(json.dumps(each["arguments"], sort_keys=True)) for each in functions]
    return render([ToolCall("", each["name"], own) for each, own in zip(functions, arguments, strict=True)])
