"""A model behind an OpenAI-compatible endpoint: vLLM's server, or an external one."""

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

from rollmill.config.rewards import JudgeSection
from rollmill.errors import ConfigError, RewardError
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

# What went wrong with a request to an endpoint, in words, and whether to try again.

_PASSING = (408, 409, 425, 429)


class RequestFailureCause(Enum):
    """Whose trouble it is."""

    WAIT = "wait"  #: the server's, perhaps only now
    USER = "user"  #: the run file's or the account's: no request will succeed
    KEY = "key"  #: the key's: no request will succeed
    TEXT = "text"  #: these messages'; with `advice`, perhaps that of any message


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """`says` names the status or the error; `wait_s` is how long the server asks to wait, and `crowded` that it has too
    many requests. `outcome` is that of a request which is given up while others succeed."""

    cause: RequestFailureCause
    set_activity: str
    advice: str = ""
    wait_s: float = 0.0
    rate_limited: bool = False
    outcome: str = TIMEOUT


def classify_error(error: Exception) -> RequestFailure:
    """What an error of the openai library means. Others of its errors and unreadable answers are worth another try."""
    if isinstance(error, openai.APITimeoutError):
        return RequestFailure(RequestFailureCause.WAIT, "no answer in time")
    if isinstance(error, openai.APIStatusError):
        return _status(error)
    if isinstance(error, openai.APIConnectionError):
        return RequestFailure(RequestFailureCause.WAIT, f"no connection ({_short(str(error.__cause__ or error))})")
    return RequestFailure(RequestFailureCause.WAIT, f"an answer that is no chat completion ({_short(str(error))})")


def _status(error: openai.APIStatusError) -> RequestFailure:
    status, code = error.status_code, str(error.code or "")
    text = _message(error)
    says = f"status {status} ({text})" if text else f"status {status}"
    if status in (400, 413, 422):
        if code == "context_length_exceeded" or "context length" in text.lower() or status == 413:
            return RequestFailure(RequestFailureCause.TEXT, says, TOO_LONG_ADVICE, outcome=TOO_LONG)
        if code in ("content_filter", "invalid_prompt"):
            return RequestFailure(RequestFailureCause.TEXT, says, outcome=REFUSED)
        advice = "it does not take the request; see `options`, `structured`, `images` and the account"
        return RequestFailure(RequestFailureCause.TEXT, says, advice, outcome=REFUSED)
    if status == 403:  # a key without rights, or a filter in front of the model
        return RequestFailure(
            RequestFailureCause.TEXT, says, "is the key (api_key_env) allowed to use the model?", outcome=REFUSED
        )
    if status == 401:
        return RequestFailure(RequestFailureCause.KEY, f"{says}, the key is refused")
    if status == 404:
        return RequestFailure(
            RequestFailureCause.USER, says, "correct `model`, or `endpoint`, which mostly ends in /v1"
        )
    if code == "insufficient_quota":
        return RequestFailure(RequestFailureCause.USER, says, "the account has no quota left")
    if status in _PASSING or status >= 500:
        wait_s = retry_after(error.response.headers, time.time())
        return RequestFailure(
            RequestFailureCause.WAIT,
            f"{says}, wait {wait_s:.0f} s" if wait_s else says,
            wait_s=wait_s,
            rate_limited=status == 429,
        )
    return RequestFailure(RequestFailureCause.USER, says, "is `endpoint` the base URL of an OpenAI-compatible server?")


def retry_after(headers: Mapping[str, str], now: float) -> float:
    """Seconds that the header Retry-After asks to wait (RFC 9110, 10.2.3: seconds, or a date); 0 without one."""
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


# Rate limits: no more than so much in any window of time.

WINDOW_S = 60.0


class RateWindow:
    """How many units passed in the last `WINDOW_S` seconds, and when more may: at most `limit` in any such time."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._passed: deque[tuple[float, int]] = deque()
        self._sum = 0

    def wait(self, units: int, now: float) -> float:
        """Seconds until the oldest entry leaves, where there is no room for `units` more; else 0.

        More than `limit` units at once pass alone, once the window is empty.
        """
        while self._passed and now - self._passed[0][0] > WINDOW_S:
            self._sum -= self._passed.popleft()[1]
        if not self._passed or self._sum + units <= self._limit:
            return 0.0
        return max(self._passed[0][0] + WINDOW_S - now, 0.0) + 1e-3

    def take(self, units: int, now: float) -> None:
        """Count units that pass now."""
        self._passed.append((now, units))
        self._sum += units


class RateLimiter:
    """Lets a request through once it fits into every window; first come, first served.

    `limits` are the units that each window lets through. `clock` and `sleep` are in seconds.
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
        """Wait until as many more units fit into each window, and take them in all windows at once."""
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
"""A text that is to be completed, or a chat."""


class EndpointChatModel:
    """Sends requests within rate limits and tries again what may succeed. Every reply is a request of its own.

    A request that fails for good although others are answered gets no reply (outcome `timeout`), and so does one that
    is refused (`refused`). When nothing has been answered since its first failure, not even a word, the endpoint is
    down: that ends the run, as does a refused key.

    Args:
        called: what errors call the model.

    Raises ConfigError where the environment variable of the key is not set.
    """

    def __init__(self, config: JudgeSection, called: str = "the judge") -> None:
        assert config.endpoint is not None
        self._called = called
        self._config, self._url, self._key = config, config.endpoint, _key(config)
        self.identity = f"{self._url.rstrip('/')} {config.model} {json.dumps(config.options, sort_keys=True)}"
        self.loop = EventLoopThread("rollmill-judge", self._finish)
        self._client: openai.AsyncOpenAI | None = None
        self._places = asyncio.Semaphore(config.max_in_flight)
        self._limits = RateLimiter([config.requests_per_minute or math.inf, config.tokens_per_minute or math.inf])
        self._answered = 0.0
        self._broken: RewardError | None = None
        self._jitter = random.Random()

    async def chat(
        self, messages: PromptOrMessages, sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """See ChatModel; a text in place of messages is completed."""
        return await gather_or_cancel(self.ask(messages, self._body(sampling, index)) for index in indices)

    async def ask(self, asked: PromptOrMessages, body: Mapping[str, Any]) -> ChatModelReply:
        """The reply to one request. Called in `loop`.

        Args:
            asked: messages, or a text that is to be completed.
            body: further fields of the request, `max_tokens` among them; `options` go over them, and None removes one.

        Raises like ChatModel.chat.
        """
        size = _estimated_tokens(asked) + body["max_tokens"]
        return await self._ask(
            asked, {k: v for k, v in {**body, **self._config.options}.items() if v is not None}, size
        )

    def close(self) -> None:
        """Close the connections. Requests under way fail."""
        self.loop.close()

    async def _ask(self, asked: PromptOrMessages, body: dict[str, Any], size: int) -> ChatModelReply:
        async with self._places:
            left, tried, troubled = self._config.deadline_s, 0, math.inf
            while True:
                await self._limits.enter(1, size)
                if self._broken is not None:
                    raise self._broken
                started = time.monotonic()
                found = await self._try(asked, body, min(self._config.try_s, left))
                tried += 1
                left -= time.monotonic() - started
                if isinstance(found, ChatModelReply):
                    self._answered = time.monotonic()
                    return replace(found, retries=tried - 1)
                troubled = min(troubled, time.monotonic())
                pause = max(self._pause(tried), found.wait_s)
                spent = tried >= self._config.tries and not found.rate_limited
                if found.cause is not RequestFailureCause.WAIT or spent or pause >= left:
                    if found.cause is RequestFailureCause.WAIT and self._answered <= troubled:
                        await self._ping(_PING_TEXT if isinstance(asked, str) else _PING, body, size)
                    self._end(found, self._answered > troubled, tried)
                left -= pause
                await asyncio.sleep(pause)

    async def _try(
        self, asked: PromptOrMessages, body: dict[str, Any], seconds: float
    ) -> ChatModelReply | RequestFailure:
        client, model = self._connected(), self._config.model or ""
        found: Any
        try:
            async with asyncio.timeout(seconds):
                if isinstance(asked, str):
                    found = await client.completions.create(model=model, prompt=asked, extra_body=body)
                else:
                    messages: Any = asked
                    found = await client.chat.completions.create(model=model, messages=messages, extra_body=body)
        except (TimeoutError, openai.APITimeoutError):
            return RequestFailure(RequestFailureCause.WAIT, f"no answer in {seconds:.0f} s")
        except (openai.OpenAIError, ValueError) as error:
            return classify_error(error)
        try:
            choice = found.choices[0]
            return _reply(choice.text if isinstance(asked, str) else choice.message.content, choice, found.usage)
        except (AttributeError, TypeError, ValueError, LookupError):  # the library takes any JSON for an answer
            what = "completion" if isinstance(asked, str) else "chat completion"
            return RequestFailure(RequestFailureCause.WAIT, f"an answer that is no {what} ({str(found)[:100]!r})")

    async def _ping(self, asked: PromptOrMessages, body: dict[str, Any], size: int) -> None:
        """Ask for a word: whatever comes back is an answer."""
        await self._limits.enter(1, size)
        if isinstance(await self._try(asked, body, self._config.try_s), ChatModelReply):
            self._answered = time.monotonic()

    def _pause(self, tried: int) -> float:
        """Exponential, with full jitter above the half."""
        longest = min(MIN_BACKOFF_S * 2.0 ** (tried - 1), MAX_BACKOFF_S)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _end(self, trouble: RequestFailure, others_answered: bool, tried: int) -> NoReturn:
        """Give a request up. `others_answered` since its first failure."""
        says = f"{self._called} {self._config.model} at {self._url}: {self._without_key(trouble.set_activity)}"
        if trouble.cause is RequestFailureCause.TEXT or (trouble.cause is RequestFailureCause.WAIT and others_answered):
            raise NoReplyError(trouble.outcome, says, trouble.advice)
        advice = trouble.advice
        if trouble.cause is RequestFailureCause.WAIT:
            advice = f"gave up after {tried} tries; is the server up, and `endpoint` its address?"
        if trouble.cause is RequestFailureCause.KEY:
            name = self._config.api_key_env
            advice = f"correct the variable {name} (api_key_env)" if name else "name the key's variable: api_key_env"
        self._broken = RewardError(f"{says}; {advice}")
        raise self._broken

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

    def _connected(self) -> openai.AsyncOpenAI:
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


def _estimated_tokens(asked: PromptOrMessages) -> int:
    total = 0
    for message in [{"content": asked}] if isinstance(asked, str) else asked:
        content = message["content"]
        for part in [{"text": content}] if isinstance(content, str) else content:
            total += len(part["text"].encode()) // 3 + 1 if "text" in part else _IMAGE_TOKENS
    return total


def _reply(said: str | None, choice: Any, usage: Any) -> ChatModelReply:
    text = "" if said is None else said + ""
    return ChatModelReply(
        text.encode("utf-8", "replace").decode(),  # JSON can hold lone surrogates, a cache cannot
        choice.finish_reason or STOP,
        prompt_tokens=int(usage.prompt_tokens or 0) if usage else 0,
        completion_tokens=int(usage.completion_tokens or 0) if usage else 0,
    )
