"""Fields of requests that the endpoint does not have: those that change nothing are ignored, others refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.rollout.endpoint.api_errors import ApiError

IGNORED_FIELDS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "cache_salt"),
    )
)
"""They say how a request is billed, kept or sped up, not what is answered."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
}
"""Values that say what is done anyway. Null always does."""

_ADVICE = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "response_format": "describe the format in the prompt",
    "parallel_tool_calls": "take the first call of the answer",
    "best_of": "ask for `n` choices and choose",
}


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Raises ApiError where a field that is not honoured would have changed the answer."""
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
    """Equal, with numbers told from booleans."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
