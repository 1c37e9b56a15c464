"""A chat model behind an OpenAI-compatible endpoint: vLLM's server, or an external one."""

from __future__ import annotations

try:
    import openai
except ImportError as error:
    from rollmill.errors import ConfigError

    raise ConfigError(
        "a model behind an `endpoint` needs the openai library; install it: pip install 'rollmill[judge]'"
    ) from error

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
from typing import TYPE_CHECKING, Any

from rollmill.concurrency import EventLoopThread, gather_or_cancel
from rollmill.errors import ConfigError, EndpointLostError, RewardError
from rollmill.progress import Progress, count_progress
from rollmill.rewards.base import TIMEOUT
from rollmill.rewards.judges.breaker import GO, PROBE, acquire_breaker, release_breaker
from rollmill.rewards.judges.chat import STOP, ChatMessage, ChatModelReply, ChatSamplingParams, NoReplyError
from rollmill.rewards.judges.failures import RequestFailure, RequestFailureCause, classify_error

if TYPE_CHECKING:
    from rollmill.rewards.judges.base import LLMJudge

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


MIN_BACKOFF_S, MAX_BACKOFF_S, MAX_PROBE_PAUSE_S = 0.5, 30.0, 10.0
_LOOK_S = 0.1
"""Seconds between two looks of a request whether an unreachable endpoint is back."""
_MAX_OUTAGES = 3
"""Outages after which a request is given up: it may cause them."""
_IMAGE_TOKENS = 1000
_PING_TEXT = "Say yes."
_PING: list[ChatMessage] = [{"role": "user", "content": _PING_TEXT}]

PromptOrMessages = str | Sequence[ChatMessage]
"""A text to complete, or a chat."""


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: PromptOrMessages
    body: dict[str, Any]
    size: int  # estimated tokens, the reply's included


class EndpointChatModel:
    """Sends requests within rate limits and retries those that may succeed. Every reply is a separate request.

    A request that finally fails while others succeed gets no reply (outcome `timeout`), and so does one that is refused
    (`refused`). An endpoint that has answered before and does not even answer a minimal request is unreachable: all
    requests wait for it, for up to `away_s`. One that has never answered, or is unreachable for longer, ends the run,
    as does a refused key.

    Args:
        called: the name of the model in errors.

    Raises ConfigError if the environment variable of the key is not set.
    """

    def __init__(self, config: LLMJudge, called: str = "the judge") -> None:
        assert config.endpoint is not None
        self._config, self._url, self._key = config, config.endpoint, _key(config)
        self._name = f"{called} {config.model} at {self._url}"
        self.identity = f"{self._url.rstrip('/')} {config.model} {json.dumps(config.options, sort_keys=True)}"
        self.loop = EventLoopThread("rollmill-judge", self._finish)
        self._client: openai.AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._limits = RateLimiter([config.requests_per_minute or math.inf, config.tokens_per_minute or math.inf])
        self._breaker = acquire_breaker(self._name)
        self._closed = False
        self._fatal_error: RewardError | None = None
        self._jitter = random.Random()

    async def chat(
        self, messages: PromptOrMessages, sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """A text in place of messages is completed."""
        return await gather_or_cancel(self.ask(messages, self._body(sampling, index)) for index in indices)

    async def ask(self, prompt: PromptOrMessages, body: Mapping[str, Any]) -> ChatModelReply:
        """Return the reply to one request. Called in `loop`.

        Args:
            prompt: messages, or a text to complete.
            body: further fields of the request, including `max_tokens`; `options` override them, and None removes one.

        Raises like ChatModel.chat.
        """
        size = _estimated_tokens(prompt) + body["max_tokens"]
        request = _Request(prompt, {k: v for k, v in {**body, **self._config.options}.items() if v is not None}, size)
        async with self._slots:
            return await self._send(request)

    def close(self) -> None:
        """Close the connections. Requests in progress fail."""
        self.loop.close()
        if not self._closed:
            self._closed = True
            release_breaker(self._breaker)

    async def _send(self, request: _Request) -> ChatModelReply:
        """Retry a request until `deadline_s` has passed; time in which the endpoint is unreachable does not count."""
        config, breaker, outages, retries = self._config, self._breaker, 0, 0
        time_left, tries, first_failure = config.deadline_s, 0, math.inf
        while True:
            if await self._until_there(request):
                outages += tries > 0
                if outages == _MAX_OUTAGES:
                    raise NoReplyError(TIMEOUT, f"{self._name}: it was away {outages} times after this request")
                time_left, tries, first_failure = config.deadline_s, 0, math.inf
            await self._limits.enter(1, request.size)
            self._require_patience()
            started = time.monotonic()
            found = await self._try_once(request, min(config.try_s, time_left))
            time_left -= time.monotonic() - started
            if isinstance(found, ChatModelReply):
                breaker.replied()
                return replace(found, retries=retries)
            if found.cause is not RequestFailureCause.WAIT:
                raise self._permanent(found)
            tries, retries = tries + 1, retries + 1
            first_failure = min(first_failure, time.monotonic())
            pause = max(self._pause(tries, MAX_BACKOFF_S), found.wait_s)
            out_of_tries = config.tries is not None and tries >= config.tries and not found.rate_limited
            last = out_of_tries or pause >= time_left
            suspect = breaker.failed(found.rate_limited)
            if suspect or (last and breaker.last_reply <= first_failure):
                await self._find_out(request, suspect or breaker.claim_probe())
            if breaker.is_open:
                continue
            if last and breaker.last_reply <= first_failure:  # it has never answered
                advice = f"gave up after {tries} tries; is the server up, and `endpoint` its address?"
                raise self._fatal(EndpointLostError, f"{self._without_key(found.message)}; {advice}")
            if last:
                raise NoReplyError(found.outcome, f"{self._name}: {self._without_key(found.message)}", found.advice)
            time_left -= pause
            await asyncio.sleep(pause)

    async def _try_once(self, request: _Request, seconds: float) -> ChatModelReply | RequestFailure:
        client, model, prompt = self._connect(), self._config.model or "", request.prompt
        found: Any
        try:
            async with asyncio.timeout(seconds):
                if isinstance(prompt, str):
                    found = await client.completions.create(model=model, prompt=prompt, extra_body=request.body)
                else:
                    messages: Any = prompt
                    found = await client.chat.completions.create(
                        model=model, messages=messages, extra_body=request.body
                    )
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

    def _pause(self, tries: int, longest: float) -> float:
        """Return the exponential backoff, with jitter between half and full."""
        return min(MIN_BACKOFF_S * 2.0 ** min(tries - 1, 30), longest) * self._jitter.uniform(0.5, 1.0)

    # -- an endpoint that is unreachable ------------------------------------------------------------------------------

    async def _until_there(self, request: _Request) -> bool:
        """Wait while the endpoint is unreachable, and send the probes whose turn it is; True if it was unreachable."""
        was_unreachable = False
        while True:
            self._require_patience()
            if (turn := self._breaker.turn()) == GO:
                return was_unreachable
            was_unreachable = was_unreachable or self._breaker.is_open
            if turn == PROBE:
                await self._probe(request)
            else:
                count_progress(Progress.PHASES)  # `away_s` bounds this wait, so it is no stall
                await asyncio.sleep(_LOOK_S)

    async def _find_out(self, request: _Request, claimed: bool) -> None:
        """Send the probe, if this request has claimed it; else wait until another request has sent one."""
        if claimed:
            await self._probe(request)
        while self._breaker.probing:
            await asyncio.sleep(_LOOK_S)

    async def _probe(self, request: _Request) -> None:
        """Send a minimal request; any reply shows that the endpoint is up. Called by the one who claimed the probe."""
        ping: PromptOrMessages = _PING_TEXT if isinstance(request.prompt, str) else _PING
        try:
            await self._limits.enter(1, request.size)
            found = await self._try_once(replace(request, prompt=ping), self._config.try_s)
            if isinstance(found, ChatModelReply) or (
                found.cause is RequestFailureCause.TEXT and self._breaker.answered  # it refuses the text, so it is up
            ):
                self._breaker.replied()
            elif found.cause is RequestFailureCause.WAIT:
                wait_s = max(self._pause(self._breaker.probes + 1, MAX_PROBE_PAUSE_S), found.wait_s)
                self._breaker.probed(self._without_key(found.message), wait_s, self._config.away_s)
            elif found.cause is not RequestFailureCause.TEXT:
                raise self._permanent(found)
        finally:
            self._breaker.end_probe()

    def _require_patience(self) -> None:
        """Raise EndpointLostError if the endpoint is unreachable for too long; and earlier errors that end the run."""
        if self._fatal_error is not None:
            raise self._fatal_error
        if (away_s := self._breaker.away_s()) > self._config.away_s:
            advice = "see whether the server runs, then resume the run; raise away_s if the server needs longer"
            raise self._fatal(
                EndpointLostError, f"did not answer for {away_s:.0f} s ({self._breaker.reason}); {advice}"
            )

    def _permanent(self, failure: RequestFailure) -> Exception:
        """Build the error of a failure that no retry mends: of these messages, or of all requests."""
        message = self._without_key(failure.message)
        if failure.cause is RequestFailureCause.TEXT:
            return NoReplyError(failure.outcome, f"{self._name}: {message}", failure.advice)
        advice = failure.advice
        if failure.cause is RequestFailureCause.KEY:
            name = self._config.api_key_env
            advice = f"correct the variable {name} (api_key_env)" if name else "name the key's variable: api_key_env"
        return self._fatal(RewardError, f"{message}; {advice}")

    def _fatal(self, kind: type[RewardError], text: str) -> RewardError:
        """Build an error that ends the run, and all requests of this model from now on."""
        self._fatal_error = kind(f"{self._name}: {text}")
        return self._fatal_error

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


def _key(config: LLMJudge) -> str | None:
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
