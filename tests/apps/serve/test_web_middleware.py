"""Refusals on connections that are used again: the body of a refused request is waited for if it is short."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPResponse

import pytest
from support.endpoints import Running, running
from support.waiting import wait_until

from rollmill.apps.serve.web import middleware

REFUSED = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{}\r\n"
NEXT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running() as made:
        yield made


def refused(site: Running, length: int, more: str = "") -> socket.socket:
    """A connection on which the server has the head of a request without a key, and nothing of its body."""
    known = set(site.server._server.server_state.connections)
    made = socket.create_connection(("127.0.0.1", int(site.address.rpartition(":")[2])), timeout=60)
    made.sendall(REFUSED.format(length, more).encode())

    def arrived() -> bool:
        new = site.server._server.server_state.connections - known
        return any(each.cycle is not None for each in new)

    wait_until(arrived)
    return made


def statuses(connection: socket.socket, count: int) -> list[int]:
    """Those of the next answers on a connection."""
    found = []
    for _ in range(count):
        answer = HTTPResponse(connection)
        answer.begin()
        answer.read()
        found.append(answer.status)
    return found


def test_a_connection_is_used_again_after_a_refusal(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body comes after the server has refused its request, together with the next request."""
    monkeypatch.setattr(middleware, "_SHORT_BODY_S", 60.0)
    with closing(refused(site, 20)) as connection:
        connection.sendall(b"x" * 20)
        assert statuses(connection, 1) == [401]
        connection.sendall(NEXT)
        assert statuses(connection, 1) == [200]


@pytest.mark.parametrize(("length", "more"), [(2**14 + 1, ""), (20, "Expect: 100-continue\r\n"), (20, "")])
def test_a_refusal_waits_for_no_long_body_and_not_for_ever(
    site: Running, monkeypatch: pytest.MonkeyPatch, length: int, more: str
) -> None:
    """Bodies that are long, that wait for the server, or that do not come."""
    monkeypatch.setattr(middleware, "_SHORT_BODY_S", 0.1 if (length, more) == (20, "") else 600.0)
    with closing(refused(site, length, more)) as connection:
        assert statuses(connection, 1) == [401]
