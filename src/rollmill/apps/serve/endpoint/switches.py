"""Variables of the chat template that a request sets: its `chat_template_kwargs`, and hints on how much to think."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollmill.apps.serve.endpoint.protocol import ApiError, ChatCompletionRequest
from rollmill.data.layouts import switches_of
from rollmill.data.readers import BadRowError
from rollmill.data.renderer import Renderer

_FIELD = "chat_template_kwargs"
_MOST_CHARACTERS = 4096
_NO_EFFORT = "none"
_THINKING = ("enable_thinking", "thinking")
"""Names under which templates read whether the model is to think."""


def template_switches(
    body: ChatCompletionRequest, defaults: Mapping[str, Any], renderer: Renderer | None
) -> dict[str, Any]:
    """The variables that the chat template gets for a request: the server's, then hints on thinking where the template
    reads them, then those that the request names itself. Raises ApiError for one that is no variable of a template.

    Variables that the template does not read are left out.

    Args:
        renderer: the model's; None if it has no chat template, which is said elsewhere.
    """
    given = body.chat_template_kwargs or {}
    try:
        if len(json.dumps(given)) > _MOST_CHARACTERS:
            text = f"`{_FIELD}` is longer than {_MOST_CHARACTERS} characters"
            raise ApiError(text, code="invalid_value", param=_FIELD)
        given = switches_of(given)
    except BadRowError as error:
        raise ApiError(str(error), code="unsupported_parameter", param=_FIELD) from error
    except RecursionError:
        raise ApiError(f"`{_FIELD}` is nested too deeply", code="invalid_value", param=_FIELD) from None
    read = None if renderer is None else renderer.template.variables
    found = {**defaults, **({} if read is None else _hints(body, read)), **given}
    return found if read is None else {key: value for key, value in found.items() if key in read}


def _hints(body: ChatCompletionRequest, read: frozenset[str]) -> dict[str, Any]:
    effort, thinking = body.reasoning_effort, body.thinking
    found: dict[str, Any] = {}
    if isinstance(effort, str):
        found |= dict.fromkeys(_THINKING, effort != _NO_EFFORT)
        if effort != _NO_EFFORT or not read.intersection(_THINKING):
            found["reasoning_effort"] = effort
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind in ("enabled", "disabled"):
        found |= dict.fromkeys(_THINKING, kind == "enabled")
    return {key: value for key, value in found.items() if key in read}
