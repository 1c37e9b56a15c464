"""A chat model behind an OpenAI-compatible endpoint: vLLM's server, or an external one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, NoReturn

import openai

from rollmill.config.rewards.judges import JudgeSection
from rollmill.errors import ConfigError, EndpointLostError, RewardError
from rollmill.rewards.base import TIMEOUT
from rollmill.rewards.function_threads import EventLoopThread, gather_or_cancel
from rollmill.rewards.judges.chat import (
    REFUSED,
    STOP,
    TOO_LONG,
    TOO_LONG_ADVICE,
    ChatMessage,
    ChatModelReply,
    ChatSamplingParams,
    NoReplyError,
)

# Classifies failures of requests to an endpoint: message, cause, and whether to retry.

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


# Rate limits: at most so many units in any time window.

WINDOW_S = 60.0


class RateWindow:
    """Units admitted in the last `WINDOW_S` seconds: at most `limit` in any such window."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._passed: deque[tuple[float, int]] = deque()
        self._sum = 0

    def wait(self, units: int, now: float) -> float:
        """Return the seconds until the oldest entry leaves, if `units` more do not fit; else 0.

        More than `limit` units at once are admitted alone, once the window is empty.
        """
        while self._passed and now - self._passed[0][0] > WINDOW_S:
            self._sum -= self._passed.popleft()[1]
        if not self._passed or self._sum + units <= self._limit:
            return 0.0
        return max(self._passed[0][0] + WINDOW_S - now, 0.0) + 1e-3

    def take(self, units: int, now: float) -> None:
        """Record units that are admitted now."""
        self._passed.append((now, units))
        self._sum += units


class RateLimiter:
    """Admits a request once it fits into every window, in order of arrival.

    `limits` are the units that each window admits. `clock` and `sleep` are in seconds.
    """

    def __init__(
        self,
        limits: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._windows = [RateWindow(limit) for limit in limits]
        self._clock, self._sleep = clock, sleep
        self._turn = asyncio.Lock()

    async def enter(self, *units: int) -> None:
        """Wait until the units fit into each window, and take them in all windows at once."""
        async with self._turn:
            while (wait := max(map(RateWindow.wait, self._windows, units, [self._clock()] * len(units)))) > 0:
                await self._sleep(wait)
            for window, more in zip(self._windows, units, strict=True):
                window.take(more, self._clock())


try:
    import openai
except ImportError as error:
    raise ConfigError(
        "a model behind an `endpoint` needs the openai library; install it: pip install 'rollmill[judge]'"
    ) from error


MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
_IMAGE_TOKENS = 1000
_PING_TEXT = "Say yes."
_PING: list[ChatMessage] = [{"role": "user", "content": _PING_TEXT}]

PromptOrMessages = str | Sequence[ChatMessage]
"""A text to complete, or a chat."""


class EndpointChatModel:
    """Sends requests within rate limits and retries those that may succeed. Every reply is a separate request.

    A request that finally fails while others succeed gets no reply (outcome `timeout`), and so does one that is refused
    (`refused`). If no request has succeeded since its first failure, including a ping, the endpoint is down: that ends
    the run, as does a refused key.

    Args:
        called: the name of the model in errors.

    Raises ConfigError if the environment variable of the key is not set.
    """

    def __init__(self, config: JudgeSection, called: str = "the judge") -> None:
        assert config.endpoint is not None
        self._called = called
        self._config, self._url, self._key = config, config.endpoint, _key(config)
        self.identity = f"{self._url.rstrip('/')} {config.model} {json.dumps(config.options, sort_keys=True)}"
        self.loop = EventLoopThread("rollmill-judge", self._finish)
        self._client: openai.AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._limits = RateLimiter([config.requests_per_minute or math.inf, config.tokens_per_minute or math.inf])
        self._last_reply = 0.0
        self._fatal_error: RewardError | None = None
        self._jitter = random.Random()

    async def chat(
        self, messages: PromptOrMessages, sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """See ChatModel; a text in place of messages is completed."""
        return await gather_or_cancel(self.ask(messages, self._body(sampling, index)) for index in indices)

    async def ask(self, prompt: PromptOrMessages, body: Mapping[str, Any]) -> ChatModelReply:
        """Return the reply to one request. Called in `loop`.

        Args:
            prompt: messages, or a text to complete.
            body: further fields of the request, including `max_tokens`; `options` override them, and None removes one.

        Raises like ChatModel.chat.
        """
        size = _estimated_tokens(prompt) + body["max_tokens"]
        return await self._send(
            prompt, {k: v for k, v in {**body, **self._config.options}.items() if v is not None}, size
        )

    def close(self) -> None:
        """Close the connections. Requests in progress fail."""
        self.loop.close()

    async def _send(self, prompt: PromptOrMessages, body: dict[str, Any], size: int) -> ChatModelReply:
        async with self._slots:
            time_left, tries, first_failure = self._config.deadline_s, 0, math.inf
            while True:
                await self._limits.enter(1, size)
                if self._fatal_error is not None:
                    raise self._fatal_error
                started = time.monotonic()
                found = await self._try_once(prompt, body, min(self._config.try_s, time_left))
                tries += 1
                time_left -= time.monotonic() - started
                if isinstance(found, ChatModelReply):
                    self._last_reply = time.monotonic()
                    return replace(found, retries=tries - 1)
                first_failure = min(first_failure, time.monotonic())
                pause = max(self._pause(tries), found.wait_s)
                exhausted = tries >= self._config.tries and not found.rate_limited
                if found.cause is not RequestFailureCause.WAIT or exhausted or pause >= time_left:
                    if found.cause is RequestFailureCause.WAIT and self._last_reply <= first_failure:
                        await self._ping(_PING_TEXT if isinstance(prompt, str) else _PING, body, size)
                    self._give_up(found, self._last_reply > first_failure, tries)
                time_left -= pause
                await asyncio.sleep(pause)

    async def _try_once(
        self, prompt: PromptOrMessages, body: dict[str, Any], seconds: float
    ) -> ChatModelReply | RequestFailure:
        client, model = self._connect(), self._config.model or ""
        found: Any
        try:
            async with asyncio.timeout(seconds):
                if isinstance(prompt, str):
                    found = await client.completions.create(model=model, prompt=prompt, extra_body=body)
                else:
                    messages: Any = prompt
                    found = await client.chat.completions.create(model=model, messages=messages, extra_body=body)
        except (TimeoutError, openai.APITimeoutError):
            return RequestFailure(RequestFailureCause.WAIT, f"no answer in {seconds:.0f} s")
        except (openai.OpenAIError, ValueError) as error:
            return classify_error(error)
        try:
            choice = found.choices[0]
            return _reply(choice.text if isinstance(prompt, str) else choice.message.content, choice, found.usage)
        except (AttributeError, TypeError, ValueError, LookupError):  # the library accepts any JSON as a reply
            what = "completion" if isinstance(prompt, str) else "chat completion"
            return RequestFailure(RequestFailureCause.WAIT, f"an answer that is not a {what} ({str(found)[:100]!r})")

    async def _ping(self, prompt: PromptOrMessages, body: dict[str, Any], size: int) -> None:
        """Send a minimal request; any reply shows that the endpoint is up."""
        await self._limits.enter(1, size)
        if isinstance(await self._try_once(prompt, body, self._config.try_s), ChatModelReply):
            self._last_reply = time.monotonic()

    def _pause(self, tries: int) -> float:
        """Return the exponential backoff, with jitter between half and full."""
        longest = min(MIN_BACKOFF_S * 2.0 ** (tries - 1), MAX_BACKOFF_S)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _give_up(self, failure: RequestFailure, others_answered: bool, tries: int) -> NoReturn:
        """Give up a request. `others_answered`: other requests succeeded since its first failure."""
        message = f"{self._called} {self._config.model} at {self._url}: {self._without_key(failure.message)}"
        if failure.cause is RequestFailureCause.TEXT or (failure.cause is RequestFailureCause.WAIT and others_answered):
            raise NoReplyError(failure.outcome, message, failure.advice)
        advice = failure.advice
        if failure.cause is RequestFailureCause.WAIT:
            advice = f"gave up after {tries} tries; is the server up, and `endpoint` its address?"
        if failure.cause is RequestFailureCause.KEY:
            name = self._config.api_key_env
            advice = f"correct the variable {name} (api_key_env)" if name else "name the key's variable: api_key_env"
        lost = failure.cause is RequestFailureCause.WAIT
        self._fatal_error = (EndpointLostError if lost else RewardError)(f"{message}; {advice}")
        raise self._fatal_error

    def _body(self, sampling: ChatSamplingParams, index: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": _seed(sampling.seed, index),
        }
        if sampling.schema is not None:
            schema = {"name": "verdict", "strict": True, "schema": sampling.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _connect(self) -> openai.AsyncOpenAI:
        if self._client is None:  # an explicit key: without one the library would take OPENAI_API_KEY
            self._client = openai.AsyncOpenAI(
                base_url=self._url, api_key=self._key or "none", max_retries=0, timeout=self._config.deadline_s
            )
        return self._client

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    async def _finish(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def _key(config: JudgeSection) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"rewards: the environment variable {config.api_key_env} (api_key_env) is not set; set it")
    return key


def _seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4]) >> 1


def _estimated_tokens(prompt: PromptOrMessages) -> int:
    total = 0
    for message in [{"content": prompt}] if isinstance(prompt, str) else prompt:
        content = message["content"]
        for part in [{"text": content}] if isinstance(content, str) else content:
            total += len(part["text"].encode()) // 3 + 1 if "text" in part else _IMAGE_TOKENS
    return total


def _reply(content: str | None, choice: Any, usage: Any) -> ChatModelReply:
    text = "" if content is None else content + ""
    return ChatModelReply(
        text.encode("utf-8", "replace").decode(),  # JSON can hold lone surrogates, a cache cannot
        choice.finish_reason or STOP,
        prompt_tokens=int(usage.prompt_tokens or 0) if usage else 0,
        completion_tokens=int(usage.completion_tokens or 0) if usage else 0,
    )
