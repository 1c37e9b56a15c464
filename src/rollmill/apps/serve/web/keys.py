"""API keys with names, from a file, the environment or the command line, and the rate limits of each."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.errors import ConfigError

KEYS_VARIABLE = "ROLLMILL_API_KEYS"
ANYONE = "anyone"
"""Name of the client of a server without keys."""
_SECRET = re.compile(r"[A-Za-z0-9._~-]{1,512}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key. Only its hash is kept, so that neither a log nor a traceback can show it.

    Attributes:
        digest: SHA-256 of the key.
        requests_per_minute: limit of its requests; None: that of the server.
        tokens_per_minute: limit of its tokens, prompts and completions together; None: that of the server.
    """

    name: str
    digest: bytes = field(repr=False)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyRing:
    """The keys of a server. Raises ConfigError for a name or key that is given twice."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        for number, key in enumerate(self.keys):
            for other in self.keys[:number]:
                if key.name == other.name:
                    raise ConfigError(f"two API keys have the name {key.name!r}; give each client its own")
                if key.digest == other.digest:
                    raise ConfigError(f"the clients {other.name!r} and {key.name!r} have the same API key")

    def find(self, shown: str) -> ApiKey | None:
        """Find the key that a client shows. The time does not depend on which key it is, or on how much is right."""
        digest, found = hashlib.sha256(shown.encode()).digest(), None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def make_key(
    name: str, secret: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
) -> ApiKey:
    """Make a key. Raises ConfigError for a name or key with other characters than letters, digits and a few signs."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"an API key's name has 1 to 64 letters, digits and . _ -, not {name[:64]!r}")
    if not _SECRET.fullmatch(secret):
        raise ConfigError(
            f"the API key of {name!r} may have letters, digits and . _ ~ - only; what follows a colon names a session"
        )
    return ApiKey(name, hashlib.sha256(secret.encode()).digest(), requests_per_minute, tokens_per_minute)


class _FileEntry(BaseModel):
    """A client in a file of keys."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: str = Field(min_length=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


def load_keys(path: Path) -> KeyRing:
    """Read a YAML file with one client per line: `NAME: KEY`, or `NAME: {key: KEY, requests_per_minute: N, ...}`.

    Raises ConfigError, which names the file and the client, and never shows a key.
    """
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the file of API keys cannot be read: {error}") from error
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", -1) + 1
        raise ConfigError(f"{path}, line {line}: not YAML; write one client per line, `NAME: KEY`") from None
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(f"{path} names no client; write one per line, `NAME: KEY`")
    keys = []
    for name, row in rows.items():
        entry = {"key": row} if isinstance(row, str) else row
        try:
            found = _FileEntry.model_validate(entry)
        except ValidationError as error:
            wrong = error.errors(include_input=False)[0]
            at = ".".join(map(str, wrong["loc"])) or "its entry"
            raise ConfigError(f"{path}: client {str(name)[:64]!r}: {at}: {wrong['msg']}") from None
        keys.append(make_key(str(name), found.key, found.requests_per_minute, found.tokens_per_minute))
    return KeyRing(keys)


def parse_keys(text: str) -> KeyRing:
    """Parse keys as `ROLLMILL_API_KEYS` has them: `NAME=KEY,NAME=KEY`. Raises ConfigError, which shows no key."""
    keys = []
    for number, part in enumerate(filter(None, (each.strip() for each in text.split(","))), start=1):
        name, equals, secret = part.partition("=")
        if not equals:
            raise ConfigError(f"{KEYS_VARIABLE}: entry {number} is not NAME=KEY; separate entries with commas")
        keys.append(make_key(name.strip(), secret.strip()))
    if not keys:
        raise ConfigError(f"{KEYS_VARIABLE} names no client; set it to NAME=KEY,NAME=KEY, or unset it")
    return KeyRing(keys)


def given_keys(file: Path | None) -> KeyRing | None:
    """The keys of a file, else those of the environment, if any are given. Raises ConfigError for wrong ones."""
    if file is not None:
        return load_keys(file)
    text = os.environ.get(KEYS_VARIABLE)
    return parse_keys(text) if text else None


class _TokenBucket:
    """A token bucket: holds a minute's worth and refills evenly. Overdrawn, it is closed until it has refilled."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_second, self._most, self._clock = per_minute / 60, float(per_minute), clock
        self._level, self._at = self._most, clock()

    def wait_s(self, wanted: float) -> float:
        """Seconds until it holds so much; 0 if it does."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, (min(wanted, self._most) - self._level) / self._per_second)

    def spend(self, count: float) -> None:
        """Take so much out."""
        self._level -= count


class KeyRateLimiter:
    """Limits the requests and tokens per minute of each client.

    Args:
        keys: the clients, with limits of their own.
        requests_per_minute: limit of clients without one; None: unlimited.
        tokens_per_minute: likewise, for the tokens of prompts and completions.
        clock: seconds.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests: dict[str, _TokenBucket] = {}
        self._tokens: dict[str, _TokenBucket] = {}
        limits = [(key.name, key.requests_per_minute, key.tokens_per_minute) for key in keys]
        for name, requests, tokens in limits or [(ANYONE, None, None)]:
            if (most := requests or requests_per_minute) is not None:
                self._requests[name] = _TokenBucket(most, clock)
            if (most := tokens or tokens_per_minute) is not None:
                self._tokens[name] = _TokenBucket(most, clock)

    def take_request(self, client: str) -> None:
        """Count a request. Raises RequestRefusedError (429) beyond the limit, with the seconds to wait."""
        if (bucket := self._requests.get(client)) is None:
            return
        if wait := bucket.wait_s(1):
            raise _too_fast(client, "requests", wait)
        bucket.spend(1)

    def check_tokens(self, client: str) -> None:
        """Raise RequestRefusedError (429) if a client has used up its tokens, with the seconds to wait."""
        if (bucket := self._tokens.get(client)) is not None and (wait := bucket.wait_s(1)):
            raise _too_fast(client, "tokens", wait)

    def spend_tokens(self, client: str, count: int) -> None:
        """Count tokens. A request that has begun is finished: what it uses beyond the limit is waited for later."""
        if (bucket := self._tokens.get(client)) is not None:
            bucket.wait_s(0)
            bucket.spend(count)


def _too_fast(client: str, what: str, wait_s: float) -> RequestRefusedError:
    text = f"the client {client!r} has used up its {what} per minute; try again in {math.ceil(wait_s)} s"
    return RequestRefusedError(text, 429, code="rate_limit_exceeded", retry_s=math.ceil(wait_s))
