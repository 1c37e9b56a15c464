"""Classifies failures of requests to an endpoint: message, cause, and whether to retry."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum

import openai

from rollmill.rewards.base import TIMEOUT
from rollmill.rewards.judges.chat import REFUSED, TOO_LONG, TOO_LONG_ADVICE

_PASSING = (408, 409, 425, 429)


class RequestFailureCause(Enum):
    """The cause of a failed request."""

    WAIT = "wait"  #: the server, perhaps temporarily
    USER = "user"  #: the run file or the account: no request will succeed
    KEY = "key"  #: the API key: no request will succeed
    TEXT = "text"  #: these messages; with `advice`, perhaps any message


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A failed request.

    `message` names the status or the error. `wait_s` is the server's retry delay in seconds; `rate_limited`: it
    has too many requests. `outcome` is the outcome of a request that is given up while others succeed.
    """

    cause: RequestFailureCause
    message: str
    advice: str = ""
    wait_s: float = 0.0
    rate_limited: bool = False
    outcome: str = TIMEOUT


def classify_error(error: Exception) -> RequestFailure:
    """Classify an error of the openai library. Its other errors and unreadable replies are worth a retry."""
    if isinstance(error, openai.APITimeoutError):
        return RequestFailure(RequestFailureCause.WAIT, "no answer in time")
    if isinstance(error, openai.APIStatusError):
        return _status(error)
    if isinstance(error, openai.APIConnectionError):
        return RequestFailure(RequestFailureCause.WAIT, f"no connection ({_short(str(error.__cause__ or error))})")
    return RequestFailure(RequestFailureCause.WAIT, f"an answer that is not a chat completion ({_short(str(error))})")


def _status(error: openai.APIStatusError) -> RequestFailure:
    status, code = error.status_code, str(error.code or "")
    text = _message(error)
    message = f"status {status} ({text})" if text else f"status {status}"
    if status in (400, 413, 422):
        if code == "context_length_exceeded" or "context length" in text.lower() or status == 413:
            return RequestFailure(RequestFailureCause.TEXT, message, TOO_LONG_ADVICE, outcome=TOO_LONG)
        if code in ("content_filter", "invalid_prompt"):
            return RequestFailure(RequestFailureCause.TEXT, message, outcome=REFUSED)
        advice = "it does not take the request; see `options`, `structured`, `images` and the account"
        return RequestFailure(RequestFailureCause.TEXT, message, advice, outcome=REFUSED)
    if status == 403:  # a key without rights, or a filter in front of the model
        return RequestFailure(
            RequestFailureCause.TEXT, message, "is the key (api_key_env) allowed to use the model?", outcome=REFUSED
        )
    if status == 401:
        return RequestFailure(RequestFailureCause.KEY, f"{message}, the key is refused")
    if status == 404:
        return RequestFailure(
            RequestFailureCause.USER, message, "correct `model`, or `endpoint`, which mostly ends in /v1"
        )
    if code == "insufficient_quota":
        return RequestFailure(RequestFailureCause.USER, message, "the account has no quota left")
    if status in _PASSING or status >= 500:
        wait_s = retry_after(error.response.headers, time.time())
        return RequestFailure(
            RequestFailureCause.WAIT,
            f"{message}, wait {wait_s:.0f} s" if wait_s else message,
            wait_s=wait_s,
            rate_limited=status == 429,
        )
    return RequestFailure(
        RequestFailureCause.USER, message, "is `endpoint` the base URL of an OpenAI-compatible server?"
    )


def retry_after(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds of the header Retry-After (RFC 9110, 10.2.3: seconds, or a date); 0 without one."""
    text = headers.get("retry-after", "").strip()
    try:
        return max(float(text), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (ValueError, TypeError):
        return 0.0


def _message(error: openai.APIStatusError) -> str:
    body = error.body
    found = body.get("message") if isinstance(body, dict) else None
    return _short(found if isinstance(found, str) else error.response.text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
