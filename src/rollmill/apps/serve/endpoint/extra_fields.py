"""Fields of requests that are not supported: those without effect are ignored, the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.apps.serve.endpoint.protocol import ApiError

IGNORED_FIELDS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "cache_salt"),
        *("cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"),
        *("prompt_cache_options", "max_tool_calls"),
        *("reasoning_effort", "verbosity", "thinking", "reasoning"),
    )
)
"""Fields on billing, storage or speed, which do not change the response; and hints on how much to think or write, which
only some models are trained to follow."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "mcp_servers": ([],),
    "context_management": ({}, []),
    "background": (False,),
    "truncation": ("disabled",),
}
"""Unsupported fields with values that ask for the default behaviour. Null always does."""

_ADVICE = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "best_of": "ask for `n` choices and choose",
}


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Raise ApiError for an unsupported field that would change the response."""
    for name, value in (extra or {}).items():
        known = NEUTRAL_VALUES.get(name, ())
        if value is None or name in IGNORED_FIELDS or any(_same(value, each) for each in known):
            continue
        advice = _ADVICE.get(name, "remove it")
        what = (
            "is not a field of this request"
            if name not in NEUTRAL_VALUES
            else "is supported with its neutral value only"
        )
        if known:
            what += f" ({known[0]!r})"
        shown = name if len(name) <= 64 and name.isprintable() else "a field"
        raise ApiError(f"`{shown}` {what}; {advice}", code="unsupported_parameter", param=shown)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes numbers from booleans."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
