"""Requests made from the OpenAPI description, right and wrong ones: none makes the server fail."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from support.endpoints import BOTH, KEY, OTHER_KEY, Running, running
from support.fuzzing import fuzz

HEADERS = {"authorization": f"Bearer {KEY}"}
CHECKS: list[Any] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip


def described(site: Running, headers: dict[str, str]) -> Any:
    """The server's description of itself, which names every route."""
    schema = schemathesis.openapi.from_url(f"{site.address}/openapi.json", headers=headers)
    app: Any = site.server._server.config.app
    paths = {route.path.replace(":path}", "}") for route in app.app.routes} - {"/openapi.json"}
    assert paths == set(schema.raw_schema["paths"])
    return schema


def still_answers(site: Running) -> None:
    """The engine and the server are as they were."""
    assert httpx.get(f"{site.address}/health").json()["status"] == "ok"
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{site.base_url}/chat/completions", json=body, headers=HEADERS).status_code == 200
    assert site.service.gate.under_way == 0
    assert not any(session.busy for session in site.service.sessions._held.values())


@pytest.mark.slow
@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.thorough)])
def test_many_requests_of_every_kind(examples: int) -> None:
    with running(max_new_tokens=4) as site:
        statuses = fuzz(described(site, HEADERS), site.address, HEADERS, examples, checks=CHECKS, secrets=[KEY])
        assert sum(statuses.values()) > 13 * examples
        assert statuses[200] > examples // 3
        still_answers(site)


@pytest.mark.slow
def test_other_clients_see_and_change_nothing() -> None:
    """One with a key of its own, one with a wrong key and one with none: an open session stays as it was."""
    own = "kept-session-of-ann"
    with running(keys=BOTH, max_new_tokens=4) as site:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        made = httpx.post(f"{site.base_url}/chat/completions", json=body, headers=HEADERS | {"x-session-id": own})
        session = site.session(own, "ann")
        schema = described(site, HEADERS)
        for key in (OTHER_KEY, "sk-wrong", ""):
            secrets = [own, made.json()["id"], KEY, OTHER_KEY]
            headers = {"authorization": f"Bearer {key}"} if key else {}
            statuses = fuzz(schema, site.address, headers, 5 if key == OTHER_KEY else 2, secrets=secrets)
            assert key == OTHER_KEY or set(statuses) <= {200, 401, 405}, statuses  # 200: /health
        assert site.session(own, "ann") is session
        assert (session.parts, len(session.recorder.calls)) == ({}, 1)
        assert not [one for one in site.kept.finished for each in one.experiences if each.info["client"] != "bob"]
        still_answers(site)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SAMPLING = ("n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "logit_bias")
OTHERS = ("messages", "prompt", "model", "tools", "tool_choice", "logprobs", "top_logprobs", "echo", "suffix", "user")
STREAMS = ("stream", "stream_options", "response_format", "return_token_ids")
ANTHROPIC = ("system", "stop_sequences", "output_config", "thinking", "mcp_servers")
RESPONSES = ("input", "instructions", "previous_response_id", "store", "text", "include", "metadata")
FIELDS = st.sampled_from([*SAMPLING, *OTHERS, *STREAMS, *ANTHROPIC, *RESPONSES])
PATHS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4},
    "responses": {"input": [{"role": "user", "content": "hi"}]},
    "messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
"""Smallest bodies by route."""


@settings(max_examples=40, deadline=None)
@given(change=st.dictionaries(FIELDS, JSON, max_size=2), path=st.sampled_from(list(PATHS)))
def test_any_value_in_any_field_is_answered_or_refused(change: dict[str, Any], path: str) -> None:
    site = shared()
    content = json.dumps(PATHS[path] | change).encode()
    headers = HEADERS | {"content-type": "application/json"}
    answer = httpx.post(f"{site.base_url}/{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code != 404 or "previous_response_id" in change


_shared: list[Any] = []


def shared() -> Running:
    """A server for all examples of this module."""
    if not _shared:
        context = running(max_new_tokens=4)
        _shared[:] = [context, context.__enter__()]
    site: Running = _shared[1]
    return site


def teardown_module() -> None:
    """End it."""
    if _shared:
        still_answers(_shared[1])
        _shared[0].__exit__(None, None, None)
