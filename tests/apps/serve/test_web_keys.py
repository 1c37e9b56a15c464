"""Keys of clients from a file or the environment, and how much each client may ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.keys import (
    ANYONE,
    ApiKey,
    KeyRateLimiter,
    KeyRing,
    given_keys,
    load_keys,
    make_key,
    parse_keys,
)
from rollmill.errors import ConfigError

SECRET = "sk-very-secret"


def test_a_file_names_clients_and_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"ann: {SECRET}\nshop: {{key: sk-2, requests_per_minute: 60, tokens_per_minute: 1000}}\n")
    keys = load_keys(file)
    assert [(key.name, key.requests_per_minute, key.tokens_per_minute) for key in keys.keys] == [
        ("ann", None, None),
        ("shop", 60, 1000),
    ]
    for shown, name in (
        (SECRET, "ann"),
        ("sk-2", "shop"),
        ("sk-", None),
        ("", None),
        ("é", None),
        (SECRET + "x", None),
    ):
        found = keys.find(shown)
        assert (found and found.name) == name


def test_keys_are_never_shown(tmp_path: Path) -> None:
    key = make_key("ann", SECRET)
    assert SECRET not in repr(KeyRing([key]).keys)
    assert SECRET not in repr(key)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no client"),
        ("- a\n", "names no client"),
        (f"ann: {{key: {SECRET}, made_up: 1}}\n", "client 'ann': made_up: Extra inputs"),
        (f"ann: {{key: {SECRET}, requests_per_minute: 0}}\n", "requests_per_minute: Input should be greater"),
        ("ann: {requests_per_minute: 1}\n", "client 'ann': key: Field required"),
        ("ann: 7\n", "client 'ann'"),
        (f"ann: '{SECRET}:x'\n", "what follows a colon names a session"),
        (f"'a b': {SECRET}\n", "an API key's name has 1 to 64"),
        (f"ann: {SECRET}\nbob: {SECRET}\n", "'ann' and 'bob' have the same API key"),
        (f"ann: [{SECRET}\nbob", "not YAML"),
    ],
)
def test_a_wrong_file_is_named_without_its_keys(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(tmp_path / "keys.yaml")
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: the file of API keys cannot be read"):
        load_keys(tmp_path / "none.yaml")


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [key.name for key in parse_keys(f"ann={SECRET}, bob=sk-2,").keys] == ["ann", "bob"]
    for wrong in (SECRET, ",", f"ann={SECRET},ann=sk-2"):
        with pytest.raises(ConfigError) as caught:
            parse_keys(wrong)
        assert SECRET not in str(caught.value)
    monkeypatch.setenv("ROLLMILL_API_KEYS", "ann=sk-1")
    found = given_keys(None)
    assert found is not None
    assert found.find("sk-1") == found.keys[0]
    monkeypatch.delenv("ROLLMILL_API_KEYS")
    assert given_keys(None) is None


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(limiter: KeyRateLimiter, client: str, what: str = "take_request") -> int | None:
    """Seconds that a client is told to wait, if it is refused."""
    found: RequestRefusedError | None = None
    try:
        getattr(limiter, what)(client)
    except RequestRefusedError as error:
        found = error
    if found is None:
        return None
    assert (found.status, found.headers()["retry-after"]) == (429, str(found.retry_s))
    return found.retry_s


def test_requests_per_minute_are_counted_for_each_client() -> None:
    clock = Clock()
    keys = [ApiKey("ann", b"a", requests_per_minute=2), ApiKey("bob", b"b")]
    limiter = KeyRateLimiter(keys, requests_per_minute=1, clock=clock)
    assert [refused(limiter, "ann") for _ in range(3)] == [None, None, 30]
    assert [refused(limiter, "bob") for _ in range(2)] == [None, 60]
    clock.now = 29.0
    assert refused(limiter, "ann") == 1
    clock.now = 30.0
    assert [refused(limiter, "ann"), refused(limiter, "ann")] == [None, 30]
    clock.now = 1000.0
    assert [refused(limiter, "ann") for _ in range(3)] == [None, None, 30], "a rest does not add up"


def test_tokens_beyond_the_limit_are_waited_for() -> None:
    clock = Clock()
    limiter = KeyRateLimiter(tokens_per_minute=60, clock=clock)
    limiter.spend_tokens(ANYONE, 90)
    assert refused(limiter, ANYONE, "check_tokens") == 31
    clock.now = 31.0
    assert refused(limiter, ANYONE, "check_tokens") is None
    assert refused(limiter, ANYONE) is None, "requests are not limited"


def test_without_limits_nothing_is_refused() -> None:
    limiter = KeyRateLimiter([ApiKey("ann", b"a")])
    limiter.spend_tokens("ann", 10**9)
    assert [refused(limiter, "ann"), refused(limiter, "ann", "check_tokens")] == [None, None]
