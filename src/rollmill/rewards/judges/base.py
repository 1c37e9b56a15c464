"""Base of the rewards with an LLM judge: the keys of the model, of its requests and of the prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollmill.config.rewards import Reward
from rollmill.config.section import Endpoint

if TYPE_CHECKING:
    from rollmill.rewards.judges.client import JudgeClient
    from rollmill.rewards.resources import RewardResources

_ENDPOINT_KEYS = (
    "model",
    "api_key_env",
    "structured",
    "options",
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "tries",
    "try_s",
    "deadline_s",
    "away_s",
    "prompt_price",
    "completion_price",
)
_RESERVED_FIELDS = {"model", "messages", "n", "stream"}


class LLMJudge(Reward):
    """Base of rewards that ask a language model for a verdict."""

    places: ClassVar[tuple[str, ...]] = ("prompt", "reference", "rubric", "verdict")
    needed: ClassVar[tuple[str, ...]] = ("verdict",)

    endpoint: Endpoint | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1: vLLM's, or an external one."""
    model: str | None = None
    """Model name at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable with the endpoint's API key. The key itself is never written to a file or
    log."""
    path: Path | None = None
    """Hugging Face folder of a chat model, served by the native engine, instead of an endpoint."""
    rubric: str | None = None
    """Rubric for the judge. A task's own column `rubric` (text, or a list of points) takes precedence."""
    template: str | None = None
    """Prompt template of the judge, with placeholders such as {prompt}, {response} and {verdict}. Default: built in."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum reply length in tokens, reasoning included. A truncated reply has no verdict."""
    seed: int = 0
    """Seed of the judge's sampling and of the order of candidates."""
    votes: int = Field(1, ge=1)
    """Replies sampled per question."""
    unparsable_reward: float = 0.0
    """Reward without a verdict: the outcomes `unparsable`, `too_long` and `refused`."""
    response_limit: int = Field(20_000, ge=1)
    """Maximum response length in characters; longer responses have the outcome `too_long` and are not sent to the
    judge."""
    images: bool = True
    """Send a task's images (its column `images`). Only supported by endpoints."""
    structured: bool = False
    """Ask the endpoint to enforce a JSON schema of reasoning and verdict."""
    options: dict[str, Any] = {}
    """Additional fields of the request body; null removes one, as in {max_tokens: null, max_completion_tokens: 900}."""
    requests_per_minute: int | None = Field(None, ge=1)
    """Maximum requests in any 60 seconds."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Maximum tokens in any 60 seconds: estimated prompt tokens (one per 3 bytes) plus `max_tokens` per reply."""
    max_in_flight: int = Field(32, ge=1)
    """Maximum number of concurrent requests."""
    tries: int | None = Field(None, ge=1)
    """Maximum attempts per request; null: as many as fit into `deadline_s`. Retried with growing pauses are statuses
    408, 409, 425 and 5xx, timeouts and lost connections. Status 429 (too many requests) is no attempt."""
    try_s: float = Field(60.0, gt=0)
    """Timeout of one attempt."""
    deadline_s: float = Field(180.0, gt=0)
    """Timeout of a request over all attempts and pauses. Waiting for a free slot is not counted, nor is the time in
    which the endpoint is unreachable."""
    away_s: float = Field(1800.0, gt=0)
    """Longest outage of an endpoint that has answered before: it answers nothing, not even a one-word request. Judging
    pauses until it is back, and so do the deadlines of what waits for it. After that the run ends."""
    cache: Path | None = None
    """SQLite file that caches replies, so that no question is paid for twice. Several runs may share it."""
    prompt_price: float = Field(0.0, ge=0)
    """Price of a million prompt tokens, in any currency, for the counter `cost`."""
    completion_price: float = Field(0.0, ge=0)
    """Price of a million completion tokens."""
    _client: JudgeClient

    def extras(self) -> dict[str, tuple[str, str]]:
        return {} if self.endpoint is None else {"endpoint": ("judge", "openai")}

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.endpoint is None) == (self.path is None):
            raise ValueError("give either endpoint (the URL of a server, with model) or path (a folder with a model)")
        if self.endpoint is not None:
            self._check_endpoint(self.endpoint)
        else:
            fields = type(self).model_fields
            for key in _ENDPOINT_KEYS:
                if getattr(self, key) != fields[key].default:
                    raise ValueError(f"{key} is honoured with endpoint, not with path; remove it")
        return self

    def _check_endpoint(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("endpoint: expected a URL such as http://localhost:8000/v1")
        if parts.username or parts.password or parts.query:
            raise ValueError("endpoint: the URL must hold no key or password; put it in a variable (api_key_env)")
        if self.model is None:
            raise ValueError("model: an endpoint needs the name of a model")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError("api_key_env: expected the name of an environment variable, not the key itself")
        if taken := _RESERVED_FIELDS & self.options.keys():
            raise ValueError(f"options: {', '.join(sorted(taken))} is set by the reward itself; remove it")

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("votes: at temperature 0 all votes are equal; raise temperature, or ask for one vote")
        return self

    @model_validator(mode="after")
    def _template_has_places(self) -> Self:
        if self.template is not None:
            found = re.findall(r"\{(\w+)\}", self.template)
            missing = [place for place in self.needed if place not in found]
            unknown = [place for place in found if place not in self.places]
            if missing or unknown:
                what = f"lacks {{{missing[0]}}}" if missing else f"names {{{unknown[0]}}}"
                places = ", ".join(f"{{{place}}}" for place in self.places)
                raise ValueError(f"template: it {what}; its places are {places}")
        return self

    @property
    def longest_request_s(self) -> float | None:
        return None if self.endpoint is None else self.deadline_s + self.try_s

    def setup(self, resources: RewardResources) -> None:
        """Connect to the judge.

        Raises:
            ConfigError: the key's variable is not set, the library is missing, or the cache cannot be used.
            ModelError: the folder holds no chat model.
        """
        from rollmill.rewards.judges.client import JudgeClient

        self._client = JudgeClient(self, resources)

    def counters(self) -> dict[str, float]:
        return self._client.counters()
