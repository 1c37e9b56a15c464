"""Several clients of one endpoint: whose sessions are whose, how much each may ask, and what is counted of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.endpoints import BOTH, CLIENT, KEY, OTHER_KEY, Running, running

from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.web.keys import KeyRing, make_key

HI: list[Any] = [{"role": "user", "content": "hi"}]
ANN, BOB = {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {OTHER_KEY}"}


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running(keys=BOTH, max_new_tokens=4) as made:
        yield made


def post(site: Running, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers=headers, timeout=60)


def ask(site: Running, session: str | None, headers: dict[str, str]) -> str:
    """A call in a session; the id of its answer."""
    named = {} if session is None else {"x-session-id": session}
    answer = post(site, "/v1/chat/completions", {"messages": HI}, headers | named)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_another_client_can_neither_reward_nor_commit_nor_see_a_session(site: Running) -> None:
    before = len(site.kept.finished)
    answer = ask(site, "mine", ANN)
    for path, body in (
        ("/feedback", {"session": "mine", "reward": -1, "commit": True}),
        ("/feedback", {"completion": answer, "reward": -1}),
        ("/commit", {"session": "mine"}),
        ("/commit", {"sessions": ["mine"]}),
        ("/s/mine/commit", {}),
        ("/s/mine/feedback", {"reward": -1}),
    ):
        foreign = post(site, path, body, BOB)
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "session_not_found"), path
        absent = post(site, path.replace("mine", "none"), {**body, **{k: "none" for k in body if k == "session"}}, BOB)
        if "session" in body:
            assert absent.text == foreign.text.replace("mine", "none"), "what exists is not told apart"
    assert post(site, "/commit", {}, BOB).json() == {"committed": [], "experiences": 0}
    assert len(site.kept.finished) == before
    assert post(site, "/feedback", {"completion": answer, "reward": 0.5, "commit": True}, ANN).status_code == 200
    [one] = site.kept.finished[-1].experiences
    assert (one.reward, one.info["session"], one.info["client"]) == (0.5, "mine", "ann")


def test_two_clients_may_use_the_same_name(site: Running) -> None:
    for _ in range(2):
        ask(site, "same", ANN)
    ask(site, "same", BOB)
    assert post(site, "/feedback", {"session": "same", "reward": 1, "commit": True}, BOB).status_code == 200
    assert [one.info["client"] for one in site.kept.finished[-1].experiences] == ["bob"]
    assert post(site, "/feedback", {"session": "same", "reward": 0, "commit": True}, ANN).status_code == 200
    assert [one.info["client"] for one in site.kept.finished[-1].experiences] == ["ann", "ann"]


def test_commit_of_all_takes_the_own_ones(site: Running) -> None:
    for headers in (ANN, BOB):
        ask(site, "all", headers)
        assert post(site, "/feedback", {"session": "all", "reward": 1}, headers).status_code == 200
    assert post(site, "/commit", {}, ANN).json()["committed"] == ["all"]
    assert site.kept.finished[-1].experiences[0].info["client"] == "ann"
    assert post(site, "/commit", {"session": "all"}, BOB).json()["committed"] == ["all"]


def test_a_client_cannot_push_out_the_sessions_of_another() -> None:
    with running(keys=BOTH, max_new_tokens=4, limits=ServiceLimits(sessions=3)) as site:
        ask(site, "first", ANN)
        for number in range(5):
            ask(site, f"flood-{number}", BOB)
        assert post(site, "/feedback", {"session": "first", "reward": 1}, ANN).status_code == 200
        assert [name for _, name in site.service.sessions._held] == ["flood-3", "flood-4", "first"]


def test_what_a_failing_sink_does_not_take_is_still_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(max_new_tokens=4) as site:
        for name in "ab":
            ask(site, name, ANN)
        take = site.kept.take
        monkeypatch.setattr(site.kept, "take", lambda finished: take(finished) if not site.kept.finished else 1 / 0)
        assert post(site, "/commit", {"sessions": ["a", "b"]}, ANN).status_code == 500
        monkeypatch.undo()
        assert post(site, "/commit", {"session": "a"}, ANN).status_code == 404
        assert post(site, "/commit", {"session": "b"}, ANN).json()["committed"] == ["b"]


def test_each_client_has_its_own_rate_of_requests() -> None:
    keys = KeyRing([make_key("ann", KEY, requests_per_minute=2), make_key("bob", OTHER_KEY)])
    with running(keys=keys) as site:
        codes = [httpx.get(f"{site.base_url}/models", headers=ANN).status_code for _ in range(2)]
        late = httpx.get(f"{site.base_url}/models", headers=ANN)
        assert (codes, late.status_code, late.json()["error"]["code"]) == ([200, 200], 429, "rate_limit_exceeded")
        assert 1 <= int(late.headers["retry-after"]) <= 30
        assert late.json()["error"]["type"] == "rate_limit_error"
        assert httpx.get(f"{site.base_url}/models", headers=BOB).status_code == 200
        for path in ("/health", "/metrics"):
            assert httpx.get(site.address + path, headers=ANN).status_code == 200


def test_a_client_that_has_used_up_its_tokens_waits() -> None:
    with running(limits=ServiceLimits(tokens_per_minute=8), max_new_tokens=16) as site:
        ask(site, None, ANN)
        late = post(site, "/v1/chat/completions", {"messages": HI}, ANN)
        assert (late.status_code, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(late.headers["retry-after"]) > 1
        assert httpx.get(f"{site.base_url}/models", headers=ANN).status_code == 200


def test_metrics_name_clients_and_no_key(site: Running) -> None:
    ask(site, None, ANN)
    httpx.get(f"{site.base_url}/models", headers={"authorization": "Bearer sk-guessed"})
    text = httpx.get(f"{site.address}/metrics", headers=BOB).text
    assert 'rollmill_requests_total{key="ann",route="/v1/chat/completions",status="200"}' in text
    assert 'rollmill_requests_total{key="",route="/v1/models",status="401"} 1.0' in text
    assert 'rollmill_completion_tokens_total{key="ann"}' in text
    assert 'rollmill_prompt_tokens_total{key="ann"}' in text
    assert not [secret for secret in (KEY, OTHER_KEY, "sk-guessed") if secret in text]


def test_a_server_without_keys_has_one_client() -> None:
    with running(key=None, max_new_tokens=4) as site:
        ask(site, "a", ANN)
        assert post(site, "/feedback", {"session": "a", "reward": 1, "commit": True}, BOB).status_code == 200
        assert site.kept.finished[0].experiences[0].info["client"] != CLIENT
