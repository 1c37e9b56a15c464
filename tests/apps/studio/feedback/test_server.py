"""The server over real HTTP: the interface for programs, and what it refuses."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.feedback_runs import Served, everything, of_kind, served

from rollmill.apps.serve.web import ConnectionLimits
from rollmill.apps.serve.web.guard import RequestGuard
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.apps.studio.feedback import open_feedback
from rollmill.apps.studio.feedback.app import MAX_BODY
from rollmill.buffer import ExperienceKind, Group

RATE = {"author": "env", "completion": "main-000005/1", "rating": 0.5}
HTML = {"accept": "text/html"}


@pytest.fixture
def client(site: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.address) as opened:
        yield opened


def form(site: Served, **fields: Any) -> dict[str, Any]:
    return {"secret": site.guard.form_secret, "group": "main-000005", "step": "2"} | fields


def test_programs_post_list_and_undo(site: Served, client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "run": "apples", "steps": 2}
    one = client.post("/feedback", json=RATE)
    assert (one.status_code, one.json()["new"]) == (200, 1)
    many = client.post("/feedback", json=[RATE | {"author": "b"}, {"author": "b", "prompt": "2+2=", "response": "4"}])
    ids = one.json()["ids"] + many.json()["ids"]
    listed = client.get("/feedback").json()
    assert [act["id"] for act in listed["acts"]] == ids
    assert listed["acts"][0] | {"at": 0} == {
        "id": ids[0],
        "act": "rate",
        "author": "env",
        "at": 0,
        "of": ["main-000005/1"],
        "step": 2,
        "task": "apples/1",
        "rating": 0.5,
        "undone_by": None,
    }
    page = client.get("/feedback", params={"limit": 2}).json()
    assert ([act["id"] for act in page["acts"]], page["next"], page["total"]) == (ids[:2], 2, 3)
    rest = client.get("/feedback", params={"limit": 2, "offset": page["next"]}).json()
    assert ([act["id"] for act in rest["acts"]], rest["next"]) == (ids[2:], None)
    assert [act["id"] for act in client.get("/feedback", params={"author": "b"}).json()["acts"]] == ids[1:]
    assert client.delete(f"/feedback/{ids[0]}", params={"author": "ann"}).json() == {"id": ids[0], "undone_by": "ann"}
    again = client.delete(f"/feedback/{ids[0]}", params={"author": "ann"})
    assert (again.status_code, again.json()["error"]) == (409, f"{ids[0]} was undone before")
    assert client.delete("/feedback/nothing", params={"author": "ann"}).status_code == 404
    assert client.delete(f"/feedback/{ids[1]}").status_code == 422
    assert [group.id for groups in everything(site.desk).values() for group in groups] == ids[1:]


def test_an_idempotency_key_makes_retries_harmless(site: Served, client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "episode 3"}
    first, again = (client.post("/feedback", json=[RATE, RATE | {"rating": 1.0}], headers=headers) for _ in range(2))
    assert first.json()["ids"] == again.json()["ids"]
    assert (first.json()["new"], again.json()["new"]) == (2, 0)
    other = client.post("/feedback", json=[RATE | {"rating": 0.0}], headers=headers)
    assert (other.status_code, "was used for other feedback" in other.json()["error"]) == (409, True)
    assert [group.info["rating"] for group in of_kind(site.desk, ExperienceKind.RATED)] == [1.0]


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"json": {"rating": 1}}, 422, "no feedback has these keys (rating)"),
        ({"json": [RATE, RATE | {"rating": 2}]}, 422, "request 2 of 2: rate: rating: Input should be less than"),
        ({"json": RATE | {"completion": "../../etc/passwd"}}, 404, "has a completion '../../etc/passwd'"),
        ({"json": RATE | {"step": -1}}, 404, "stores no completions of step -1"),
        ({"json": RATE | {"step": 10**30}}, 404, "stores no completions of step 1000000"),
        ({"json": RATE | {"step": "../2"}}, 422, "rate: step"),
        ({"json": []}, 422, "a list of 1 to 1000 requests"),
        ({"json": "rate"}, 422, "expected a JSON object, found str"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 422, "the body is not JSON"),
        ({"content": b"[" * 9999, "headers": {"content-type": "application/json"}}, 422, "the body is not JSON"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "Content-Type: application/json"),
        ({"data": RATE}, 415, "Content-Type: application/json"),
        ({"content": iter([b"{}"])}, 411, "send Content-Length"),
        ({"content": b" " * (MAX_BODY + 1)}, 413, f"more than the {MAX_BODY} bytes"),
    ],
)
def test_requests_that_cannot_be_done(
    client: httpx.Client, site: Served, sent: dict[str, Any], status: int, said: str
) -> None:
    answer = client.post("/feedback", **sent)
    assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
    assert everything(site.desk) == {"rated": [], "expert": [], "preference": []}


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:80"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "192.168.1.7"},
        {"host": ""},
        {"host": "[::1"},
        {"host": "localhost@evil.example"},
        {"host": "evil.example#localhost"},
        {"origin": "http://["},
        {"origin": "http://user@127.0.0.1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_are_refused(client: httpx.Client, site: Served, headers: dict[str, str]) -> None:
    made = site.desk.submit([]).new
    assert client.post("/feedback", json=RATE, headers=headers).status_code == 403
    data = form(site, completion="main-000005/1", rating="1")
    assert client.post("/rate", data=data, headers=headers).status_code == 403
    assert client.delete("/feedback/x", params={"author": "a"}, headers=headers).status_code == 403
    assert (made, everything(site.desk)) == (0, {"rated": [], "expert": [], "preference": []})


def test_other_sites_may_link_here_but_not_embed(client: httpx.Client, site: Served) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200
    assert (
        client.get("/feedback", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code
        == 403
    )
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    for path in ("/", "/feedback", "/static/page.css", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers


def test_own_pages_and_forwarded_ports_are_served(client: httpx.Client, site: Served) -> None:
    for host in ("localhost:9000", "127.0.0.1", "[::1]:8760"):
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert client.post("/feedback", json=RATE, headers=own).status_code == 200
    assert len(of_kind(site.desk, ExperienceKind.RATED)) == 1


def test_forms_need_the_secret_of_the_page(client: httpx.Client, site: Served) -> None:
    data = form(site, completion="main-000005/1", rating="1")
    for wrong in ({}, {"secret": "é"}, {"secret": ""}):
        answer = client.post("/rate", data={key: value for key, value in data.items() if key != "secret"} | wrong)
        assert (answer.status_code, "reload the page" in answer.text) == (403, True)
    assert client.post("/rate", json=data).status_code == 415
    assert everything(site.desk)["rated"] == []
    assert client.post("/rate", data=data).status_code == 303
    assert len(everything(site.desk)["rated"]) == 1


def test_a_token_is_needed_where_others_can_reach_the_server(made: Path, tmp_path: Path) -> None:
    with (
        served(shutil.copytree(made, tmp_path / "apples"), "0.0.0.0", "hush") as site,
        httpx.Client(base_url=site.address) as client,
    ):
        for path in ("/", "/feedback", "/static/page.css", "/health"):
            assert client.get(path).status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.post("/feedback", json=RATE).status_code == 401
        assert client.post("/feedback", json=RATE, headers={"authorization": "Bearer hush"}).status_code == 200
        opened = client.get("/?token=hush")
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert "HttpOnly; Path=/; SameSite=strict" in opened.headers["set-cookie"]
        assert client.get("/").status_code == 200
        assert client.get("/", headers={"host": "192.168.1.7:8760"}).status_code == 200
        assert client.get("/", headers={"host": socket.gethostname()}).status_code == 200
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_several_clients_have_names_and_limits(made: Path, tmp_path: Path) -> None:
    keys = KeyRing([make_key("zoe", "sk-1", requests_per_minute=3), make_key("shop", "sk-2")])
    with served(shutil.copytree(made, tmp_path / "apples"), keys=keys) as site:
        with httpx.Client(base_url=site.address, follow_redirects=True) as client:
            assert 'value="zoe"' in client.get("/?token=sk-1", headers=HTML).text
            data = form(site, completion="main-000005/1", rating="1")
            assert client.post("/rate", data=data, follow_redirects=False).status_code == 303
            assert client.get("/").status_code == 200
            late = client.get("/")
            assert (late.status_code, "try again in" in late.text) == (429, True)
            assert int(late.headers["retry-after"]) > 0
            assert client.get("/health").status_code == 200
        assert (
            httpx.post(f"{site.address}/feedback", json=RATE, headers={"authorization": "Bearer sk-2"}).status_code
            == 200
        )
        assert [group.author for group in of_kind(site.desk, ExperienceKind.RATED)] == ["zoe", "env"]


def test_half_sent_requests_are_ended_and_keep_nobody_out(made: Path, tmp_path: Path) -> None:
    limits = ConnectionLimits(connections=16, header_s=0.3, linger_s=0.2)
    with served(shutil.copytree(made, tmp_path / "apples"), connections=limits) as site, ExitStack() as stack:
        port = int(site.address.rpartition(":")[2])
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(40)]
        for each in waiting:
            with suppress(ConnectionError):
                each.sendall(b"GET /health HT")
        assert httpx.get(f"{site.address}/health", timeout=60).status_code == 200
        for each in waiting:
            with suppress(ConnectionError):
                assert each.recv(100)[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 503")


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"authorization": "Bearer wrong"}])
def test_who_is_refused_learns_nothing(made: Path, tmp_path: Path, headers: dict[str, str]) -> None:
    """Least of all the secret of the forms: an attacker's name that is pointed here may read the answer."""
    with (
        served(shutil.copytree(made, tmp_path / "apples"), token="hush") as site,
        httpx.Client(base_url=site.address) as client,
    ):
        answer = client.get("/", headers=HTML | headers)
        assert answer.status_code in (401, 403)
        assert answer.headers["content-type"].startswith("text/plain")
        assert not {site.guard.form_secret, "apples", "ann"} & set(answer.text.replace('"', " ").split())
        assert site.guard.form_secret not in answer.text


def test_a_body_that_does_not_come_is_not_waited_for(made: Path, tmp_path: Path) -> None:
    with served(shutil.copytree(made, tmp_path / "apples"), body_s=0.1) as site:
        port = int(site.address.rpartition(":")[2])
        for path, kind in (("/feedback", "application/json"), ("/rate", "application/x-www-form-urlencoded")):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 9\r\n\r\n"
                slow.sendall(head.encode() + b"{")
                assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert httpx.get(f"{site.address}/health").status_code == 200


def test_many_wrong_keys_make_a_short_answer(client: httpx.Client) -> None:
    many = {f"k{number}": 1 for number in range(1000)}
    for row in (many, many | {"author": "a", "prompt": "b", "response": "c"}):
        answer = client.post("/feedback", json=row)
        assert (answer.status_code, len(answer.text) < 1000) == (422, True)
    assert "; and 990 more" in answer.text


def test_the_secret_is_not_shown_by_repr() -> None:
    guard = RequestGuard()
    assert guard.form_secret not in repr(guard)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/group?step=../1&group=a",
        "/group?step=2&group=../x",
        "/group?group=a",
        "/group?step=99999999999999999999&group=a",
        "/history?page=x",
        "/?step=a",
        "/?order=worst",
        "/?at_least=much",
        "/docs",
    ],
)
def test_addresses_that_lead_nowhere(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers=HTML)
    assert answer.status_code in (404, 422)
    assert "Not done" in answer.text
    assert "Traceback" not in answer.text


def test_undo_twice_through_the_page(client: httpx.Client, site: Served) -> None:
    client.post("/rate", data=form(site, completion="main-000005/1", rating="1"))
    [group] = of_kind(site.desk, ExperienceKind.RATED)
    undo = form(site, id=group.id, back="group")
    for _ in range(2):
        answer = client.post("/undo", data=undo, follow_redirects=True)
        assert (answer.status_code, "Undone: ann rated it 1" in " ".join(answer.text.split())) == (200, True)
    assert of_kind(site.desk, ExperienceKind.RATED) == []
    client.post("/undo", data=undo | {"again": "1"})
    assert [one.id for one in of_kind(site.desk, ExperienceKind.RATED)] == [group.id]


def test_a_form_sent_twice_is_done_once(client: httpx.Client, site: Served) -> None:
    data = form(site, completion="main-000005/1", text="a\r\nb", key="k1")
    assert [client.post("/edit", data=data).status_code for _ in range(2)] == [303, 303]
    [group] = of_kind(site.desk, ExperienceKind.EXPERT)
    assert group.experiences[0].response == "a\nb"


def test_a_refused_answer_is_not_lost(client: httpx.Client, site: Served) -> None:
    answer = client.post("/edit", data=form(site, completion="main-000005/1", text="long work <eos>"))
    assert answer.status_code == 422
    assert "long work &lt;eos&gt;" in answer.text
    damaged = site.desk.stored.run_dir / "rollouts" / "step-000002.jsonl"
    damaged.write_text(damaged.read_text().replace('"versions"', '"visions"'))
    client.cookies.set("rollmill-author", "bob")
    answer = client.post("/edit", data=form(site, completion="main-000005/1", text="more work"))
    assert (answer.status_code, "more work" in answer.text, 'value="bob"' in answer.text) == (500, True, True)
    incomplete = client.post("/compare", data=form(site, better="main-000005/1"))
    assert (incomplete.status_code, "lacks `worse`" in incomplete.text) == (422, True)


def test_names_are_changed_on_the_page(client: httpx.Client, site: Served) -> None:
    named = client.post("/name", data=form(site, author=" Zoë <b> ", back="/history"))
    assert (named.status_code, named.headers["location"]) == (303, "/history")
    client.post("/rate", data=form(site, completion="main-000005/1", rating="1"))
    assert of_kind(site.desk, ExperienceKind.RATED)[0].author == "Zoë <b>"
    assert "Zoë &lt;b&gt;" in client.get("/history").text
    for elsewhere in ("//evil.example", "http://evil.example", "/\\evil.example", "/a\nb"):
        sent = client.post("/name", data=form(site, author="ann", back=elsewhere))
        assert sent.headers["location"] == "/"
    assert client.post("/name", data=form(site, author="\u202e")).status_code == 422


def test_filters_and_orders(client: httpx.Client, site: Served) -> None:
    def groups(**query: Any) -> list[str]:
        text = client.get("/", params=query, headers=HTML).text
        return [part.partition('"')[0] for part in text.split("amp;group=")[1:]]

    assert groups() == ["main-000004", "main-000005", "main-000002", "main-000003"]
    assert groups(step=1) == ["main-000002", "main-000003"]
    assert groups(before=2, task="") == ["main-000002", "main-000003"]
    assert groups(task="apples/1") == ["main-000005", "main-000003"]
    assert groups(at_most=0.5) == ["main-000005", "main-000003"]
    assert groups(at_least=0.1, at_most=0.2) == []
    assert groups(order="disagreement") == ["main-000005", "main-000003", "main-000004", "main-000002"]
    client.post("/feedback", json=RATE)
    assert groups(order="unrated") == ["main-000004", "main-000002", "main-000003", "main-000005"]
    assert groups(task="unknown") == []


def test_clients_at_once_while_the_run_writes_and_reads(site: Served) -> None:
    """Four programs give feedback while a run puts and takes groups of its own in the same file."""
    run = open_feedback(site.desk.stored.run_dir).acts._store
    experiences = site.desk.stored.group(2, "main-000005")
    failures: list[Exception] = []
    taken: list[Group] = []

    def post(number: int) -> None:
        try:
            with httpx.Client(base_url=site.address, timeout=60) as client:
                for index in range(5):
                    row = {"author": f"p{number}", "prompt": f"{number}+{index}=", "response": str(number + index)}
                    assert client.post("/feedback", json=[row, RATE | {"author": f"p{number}"}]).status_code == 200
        except Exception as error:
            failures.append(error)

    def train() -> None:
        try:
            for step in range(1, 21):
                run.put([Group(f"main-{step}", experiences)])
                taken.extend(run.take(1, step=step, deadline_s=30))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=post, args=[number]) for number in range(4)] + [threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.close()
    assert failures == []
    assert [group.id for group in taken] == [f"main-{step}" for step in range(1, 21)]
    answers = [group.experiences[0].response for group in of_kind(site.desk, ExperienceKind.EXPERT)]
    assert sorted(answers) == sorted(str(number + index) for number in range(4) for index in range(5))
    assert sorted(group.author for group in of_kind(site.desk, ExperienceKind.RATED)) == ["p0", "p1", "p2", "p3"]
