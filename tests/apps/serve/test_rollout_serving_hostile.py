"""Clients that send too much, too slowly or too many: each is refused in time, and others are answered meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import httpx
import pytest
from support.endpoints import KEY, Running, running
from support.waiting import wait_until

from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.web import ConnectionLimits

HEADERS = {"authorization": f"Bearer {KEY}"}
QUICK = ConnectionLimits(header_s=0.2, write_s=0.2, linger_s=0.2, keep_alive_s=60)
PATIENT = ConnectionLimits(connections=16, header_s=600)
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    with running(connections=QUICK, body_s=0.2) as made:
        yield made


def opened(site: Running, sent: str = "") -> socket.socket:
    """A connection that has sent this."""
    made = socket.create_connection(("127.0.0.1", int(site.address.rpartition(":")[2])), timeout=60)
    made.sendall(sent.encode())
    return made


def until_closed(connection: socket.socket) -> bytes:
    """All that a connection is answered, until the server closes it."""
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


def watched(site: Running) -> list[int]:
    """The answers to those who watch the server."""
    with httpx.Client(timeout=60) as client:
        return [client.get(site.address + path, headers=HEADERS).status_code for path in ("/health", "/metrics")]


def connections(site: Running) -> int:
    return len(site.server._server.server_state.connections)


# -- too much --------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_refused_by_its_length() -> None:
    """By that of its body, which follows from the context; or, if more is allowed, by that of its text."""
    body = {"prompt": "how many apples " * 450_000}
    with running() as site:
        assert site.service.most_bytes == 2**20
        answer = httpx.post(f"{site.base_url}/completions", json=body, headers=HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    with running(limits=ServiceLimits(most_bytes=8 * 2**20)) as site:
        encoded: list[int] = []
        site.service.chat.renderer()  # has encoded its probes
        encode = site.service.chat.tokenizer.encode
        site.service.chat.tokenizer.encode = lambda text, **options: (
            encoded.append(len(text)) or encode(text, **options)
        )
        for path, long in (
            ("completions", body),
            ("chat/completions", {"messages": [{"role": "user", "content": body["prompt"]}]}),
        ):
            answer = httpx.post(f"{site.base_url}/{path}", json=long, headers=HEADERS, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "characters, of which at most" in answer.json()["error"]["message"]
        ids = httpx.post(f"{site.base_url}/completions", json={"prompt": [1] * 500_000}, headers=HEADERS, timeout=60)
        assert ids.json()["error"]["code"] == "context_length_exceeded"
        assert encoded == []


def test_the_beginning_of_a_long_text_is_enough_to_refuse_it() -> None:
    with running() as site:
        encoded: list[int] = []
        site.service.chat.renderer()  # has encoded its probes
        encode = site.service.chat.tokenizer.encode
        site.service.chat.tokenizer.encode = lambda text, **options: (
            encoded.append(len(text)) or encode(text, **options)
        )
        site.service._longest_token = 128  # as large vocabularies have
        text = "a1b2" * (25 * site.service.context)
        answer = httpx.post(f"{site.base_url}/completions", json={"prompt": text}, headers=HEADERS, timeout=60)
        assert "the prompt has more than" in answer.json()["error"]["message"]
        assert encoded == [16 * site.service.context]


def test_the_server_is_watched_while_prompts_are_tokenized() -> None:
    """More of them than threads; the rest waits, and is counted."""
    go_on = threading.Event()
    with running(limits=ServiceLimits(requests=4)) as site:
        site.service._longest_token = 128  # as large vocabularies have
        site.service.chat.renderer()  # has encoded its probes
        encode = site.service.chat.tokenizer.encode

        def slow(text: str, **options: Any) -> Any:
            assert go_on.wait(60)
            return encode(text, **options)

        site.service.chat.tokenizer.encode = slow
        answers: list[int] = []

        def ask() -> None:
            body = {"prompt": "how many apples " * 1200, "max_tokens": 1}
            answers.append(
                httpx.post(f"{site.base_url}/completions", json=body, headers=HEADERS, timeout=60).status_code
            )

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        wait_until(lambda: site.service.gate.under_way == 4)
        assert watched(site) == [200, 200]
        ask()
        assert answers == [429]
        go_on.set()
        for each in threads:
            each.join()
        assert answers == [429, 400, 400, 400, 400]


def test_a_session_that_ends_while_its_prompt_is_tokenized_asks_nothing() -> None:
    go_on, tokenizing = threading.Event(), threading.Event()
    with running(max_position_embeddings=32768) as site:
        site.service.chat.renderer()  # has encoded its probes
        encode = site.service.chat.tokenizer.encode

        def slow(text: str, **options: Any) -> Any:
            tokenizing.set()
            assert go_on.wait(60)
            return encode(text, **options)

        site.service.chat.tokenizer.encode = slow
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": "how many apples " * 1200, "max_tokens": 1}
            headers = HEADERS | {"x-session-id": "over"}
            answers.append(httpx.post(f"{site.base_url}/completions", json=body, headers=headers, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        assert tokenizing.wait(60)
        site.loop.call_soon_threadsafe(site.service.sessions.remove, site.session("over"))
        go_on.set()
        thread.join()
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (404, "session_ended")
        assert not site.service.engine.core.has_work  # type: ignore[attr-defined]


def test_a_body_of_many_wrong_items_names_one(quick: Running) -> None:
    content = json.dumps({"messages": [0] * 200_000}).encode()
    headers = HEADERS | {"content-type": "application/json"}
    answer = httpx.post(f"{quick.base_url}/chat/completions", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0")
    assert len(answer.text) < 1000


def test_a_body_in_tiny_chunks_is_refused(quick: Running) -> None:
    head = HEAD + "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with closing(opened(quick, head + "1\r\nx\r\n" * 1000)) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 400")
    body = json.dumps({"prompt": "how", "max_tokens": 1}).encode()
    pieces = (body[at : at + 3] for at in range(0, len(body), 3))
    headers = HEADERS | {"content-type": "application/json"}
    assert httpx.post(f"{quick.base_url}/completions", content=pieces, headers=headers).status_code == 200


# -- too slowly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "GET /health HT", "GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_headers_that_do_not_come_are_not_waited_for(quick: Running, sent: str) -> None:
    with closing(opened(quick, sent)) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 408" if sent else b"")


def test_headers_that_come_byte_by_byte_have_the_same_deadline(quick: Running) -> None:
    with closing(opened(quick, "GET /health HTTP/1.1\r\n")) as connection:
        connection.settimeout(0.02)
        for _ in range(3000):
            try:
                connection.sendall(b"X")
                if (found := connection.recv(100)) is not None:
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                found = b""
                break
        else:
            pytest.fail("the server waits for ever")
        assert found.startswith(b"HTTP/1.1 408") or not found


def test_the_second_request_of_a_connection_has_a_deadline_too(quick: Running) -> None:
    with closing(opened(quick, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HT")
        assert b"HTTP/1.1 408" in until_closed(connection)


def test_a_body_that_does_not_come_is_not_waited_for(quick: Running) -> None:
    with closing(opened(quick, f"{HEAD}Content-Length: 99\r\n\r\n{{")) as connection:
        answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer


def test_no_body_is_read_for_those_who_need_no_key(quick: Running) -> None:
    with closing(
        opened(quick, "GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
    ) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 200")


def test_the_rest_of_a_refused_body_is_not_waited_for(quick: Running) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with closing(opened(quick, head)) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        for _ in range(3000):
            try:
                connection.sendall(b"x")
            except ConnectionError:
                break
            threading.Event().wait(0.02)
        else:
            pytest.fail("the server reads for ever")


def test_an_answer_that_is_not_read_is_given_up(quick: Running) -> None:
    wait_until(lambda: connections(quick) == 0)
    ask = f"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    with closing(opened(quick)) as connection:
        wait_until(lambda: connections(quick) == 1)
        connection.settimeout(0.5)
        with suppress(OSError):  # neither side reads any more, or the server has given up
            for _ in range(4000):
                connection.sendall(ask.encode())
        wait_until(lambda: connections(quick) == 0)
    assert watched(quick) == [200, 200]


# -- too many --------------------------------------------------------------------------------------------------


def test_half_sent_requests_do_not_keep_others_out() -> None:
    with running(connections=PATIENT) as site, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        resting = client.get(f"{site.address}/health").extensions["network_stream"].get_extra_info("client_addr")
        waiting = [stack.enter_context(closing(opened(site, "GET /health HT"))) for _ in range(60)]
        assert watched(site) == [200, 200]
        again = client.get(f"{site.address}/health").extensions["network_stream"].get_extra_info("client_addr")
        assert again == resting, "a connection that was answered before is not closed for them"
        assert connections(site) <= 17 + 16 * 4
        assert until_closed(waiting[0]).startswith(b"HTTP/1.1 503")
        waiting[-1].sendall(b"TP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert until_closed(waiting[-1]).startswith(b"HTTP/1.1 200"), "the newest are still served"


def test_of_many_clients_at_once_each_gets_an_answer() -> None:
    """Those that are too many are told when to come again, also if they send their requests only then."""
    with running(connections=PATIENT) as site, ExitStack() as stack:
        clients = [stack.enter_context(closing(opened(site, ""))) for _ in range(70)]
        for each in clients:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = [until_closed(each) for each in clients]
        refused = [each for each in answers if each.startswith(b"HTTP/1.1 503")]
        assert all(b"retry-after: 1" in each for each in refused)
        assert len([each for each in answers if each.startswith(b"HTTP/1.1 200")]) == 70 - len(refused) >= 16
        late = [stack.enter_context(closing(opened(site, ""))) for _ in range(120)]
        wait_until(lambda: connections(site) <= 16 * 5)
        assert watched(site) == [200, 200], "however many stay"
        del late


def test_requests_that_are_answered_are_never_closed_for_new_ones() -> None:
    with running(connections=PATIENT, max_new_tokens=2) as site, ExitStack() as stack:
        site.service.engine.pause()
        body = json.dumps({"prompt": "hi"})
        request = (
            f"{HEAD}Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )
        asking = [stack.enter_context(closing(opened(site, request))) for _ in range(16)]
        wait_until(lambda: site.service.gate.under_way == 16)
        refused = until_closed(stack.enter_context(closing(opened(site, "GET /health HT"))))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in refused
        site.loop.call_soon_threadsafe(site.service.engine.resume)
        assert [until_closed(each)[:12] for each in asking] == [b"HTTP/1.1 200"] * 16


@pytest.mark.slow
def test_the_server_is_watched_under_every_load_at_once() -> None:
    """Long prompts, long nonsense, half-sent requests and conversations; how fast is what `bench serve` says."""
    limits = ServiceLimits(requests=64, most_bytes=8 * 2**20)
    with running(limits=limits, max_new_tokens=8, max_position_embeddings=4096) as site, ExitStack() as stack:
        texts = [" how many apples" * 437_500, "x" * 7_000_000, "a1b2" * 10_000]
        bodies: list[Any] = [{"prompt": text} for text in texts]
        bodies += [{"messages": [0] * 1_000_000}, {"messages": [{"role": "user", "content": ""}] * 50_000}]
        statuses: list[int] = []

        def send(body: Any) -> None:
            path = "chat/completions" if "messages" in body else "completions"
            for _ in range(3):
                answer = httpx.post(f"{site.base_url}/{path}", json=body, headers=HEADERS, timeout=240)
                statuses.append(answer.status_code)

        for _ in range(200):
            stack.enter_context(closing(opened(site, "POST /v1/completions HTTP/1.1\r\nHost: localh")))
        threads = [threading.Thread(target=send, args=[body]) for body in [*bodies, *[{"prompt": "hi"}] * 8]]
        for each in threads:
            each.start()
        during = 0
        while any(each.is_alive() for each in threads):
            assert watched(site) == [200, 200]
            during += any(each.is_alive() for each in threads)
        assert during > 0
        assert len(statuses) == 3 * len(threads)
        assert set(statuses) <= {200, 400, 429}
