"""The server over HTTP: what its pages ask for, who is refused, and which files are served."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import feedback_runs
from support.ui_runs import ServedRuns, killed_run, make_run, served

from rollmill.apps.studio.feedback import open_feedback

HERE = {"a": "one", "b": "two"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRuns]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", 30)
    make_run(folder / "two", 30, seed=1, gain=0.01, seed_of_run=1)
    killed_run(folder / "killed")
    with served(folder) as running:
        yield running


@pytest.fixture
def client(site: ServedRuns) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.address, timeout=60) as opened:
        yield opened


def ask(client: httpx.Client, path: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_runs_and_one_of_them(client: httpx.Client, site: ServedRuns) -> None:
    found = ask(client, "runs")
    assert found["root"] == str(site.folder.resolve())
    assert {run["id"]: run["state"] for run in found["runs"]} == {
        "one": "unknown",
        "two": "unknown",
        "killed": "killed",
    }
    one = ask(client, "run", run="killed")
    assert [event["event"] for event in one["events"]] == ["restart", "incident", "stuck"]
    assert [(each["name"], each["state"]) for each in one["processes"]] == [("trainer", "gone")]
    assert (one["stages"], one["last_step"], one["problems"]) == (["train"], 22, [])
    assert "name: killed" in ask(client, "config", run="killed")["text"]


def test_curves_of_several_runs(client: httpx.Client) -> None:
    found = ask(client, "curves", run=["one", "two"], key=["reward/mean", "nothing"], x="tokens", points=10)["curves"]
    assert [(curve["run"], curve["key"], len(curve["x"])) for curve in found] == [
        ("one", "reward/mean", 10),
        ("two", "reward/mean", 10),
    ]
    whole = ask(client, "curves", run="one", key="eval/sampled")["curves"][0]
    assert (whole["x"], whole["low"]) == ([10.0, 20.0, 30.0], None)


def test_what_a_step_and_the_pipeline_did(client: httpx.Client) -> None:
    funnel = ask(client, "funnel", run="one", first=21)
    assert (funnel["groups"], funnel["experiences"]) == (50.0, 120.0)
    assert [each["name"] for each in funnel["operators"]] == ["uniform", "length_bonus"]
    assert funnel["operators"][0]["reasons"] == {"too_easy": 50.0, "too_hard": 30.0}
    assert funnel["operators"][0]["dropped"] == 80.0
    timeline = ask(client, "timeline", run="one")
    assert (timeline["steps"], timeline["timeline"]["step"]) == ([10], 10)
    assert ask(client, "timeline", run="one", step=10) == timeline


def test_completions_are_found_and_opened(client: httpx.Client) -> None:
    found = ask(client, "rollouts", run="one", text="do not know", sort="oldest", limit=3)
    assert (found["total"], found["pending"]) == (12, 0)
    row = found["rows"][0]
    where = {"run": "one", "step": row["step"], "offset": row["offset"], "id": row["id"]}
    tokens = ask(client, "rollout", **where)
    assert "I do not know." in "".join(tokens["texts"])
    assert len(tokens["ids"]) == len(tokens["logprobs"]) == tokens["total"]
    [tree] = ask(client, "episode", **where)["trees"]
    assert tree["role"] == "prompt"


def test_completions_of_evaluations(client: httpx.Client) -> None:
    found = ask(client, "rollouts", run="one", of="evaluations", task="t2", sort="oldest")
    assert [(row["step"], row["task"], row["response"]) for row in found["rows"]] == [
        (10, "t2", "3"),
        (20, "t2", "3"),
        (30, "t2", "3"),
    ]
    row = found["rows"][0]
    where = {"run": "one", "of": "evaluations", "step": 10, "offset": row["offset"], "id": row["id"]}
    assert "2+1=3" in "".join(ask(client, "rollout", **where)["texts"])
    assert ask(client, "episode", **where)["trees"][0]["text"] == "2+1="


def test_two_runs_are_compared(client: httpx.Client) -> None:
    found = ask(client, "compare", **HERE)
    rewards = next(row for row in found["metrics"] if row["key"] == "reward/mean")
    assert rewards["high"] < 0  # the second run learns more slowly
    assert {row["key"] for row in found["config"]} == {"name", "seed_of_run"}
    assert found["evaluations"]["step"] == 30


@pytest.mark.parametrize(
    ("path", "params", "status", "says"),
    [
        ("run", {"run": "../one"}, 404, "there is no run"),
        ("run", {}, 422, "run: Field required"),
        ("curves", {"run": "one", "key": "loss", "x": "hours"}, 422, "x: Input should be"),
        ("curves", {"run": ["one"] * 300, "key": "loss"}, 422, "run: List should have"),
        ("curves", {"run": "one", "key": "loss", "points": 10**9}, 422, "points"),
        ("rollouts", {"run": "one", "step": 10**30}, 422, "step"),
        ("rollouts", {"run": "one", "sort": "id; DROP"}, 422, "sort"),
        ("rollout", {"run": "one", "step": 10, "offset": 5, "id": "x"}, 404, "has no completion 'x'"),
        ("rollout", {"run": "one", "step": 999, "offset": 0, "id": "x"}, 404, "has no completion 'x'"),
        ("episode", {"run": "one", "step": 10, "offset": 3, "id": "x"}, 404, "has no completion"),
        ("compare", {"a": "one", "b": "one"}, 422, "two different runs"),
        ("verify", {"run": "one", "name": "x"}, 405, "Method Not Allowed"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_what_cannot_be_answered_says_why(
    client: httpx.Client, path: str, params: dict[str, Any], status: int, says: str
) -> None:
    answer = client.get(f"/api/{path}", params=params)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:80"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_are_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/api/runs", "/static/app.js"):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, "one" in answer.text.split()) == (403, False)


def test_other_sites_cannot_start_a_verification(client: httpx.Client) -> None:
    where = {"params": {"run": "one", "name": "step-000010"}, "headers": {"content-length": "0"}}
    assert client.post("/api/verify", **where).status_code == 200
    where["headers"] |= {"origin": "http://evil.example"}
    assert client.post("/api/verify", **where).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "/etc/passwd",
        "vendor/../../app.py",
        "vendor",
        "",
        "vendor/LICENSE-htm",
    ],
)
def test_only_the_files_of_the_page_are_served(client: httpx.Client, path: str) -> None:
    answer = client.send(client.build_request("GET", httpx.URL(client.base_url, raw_path=f"/static/{path}".encode())))
    assert answer.status_code == 404


def test_the_page_needs_nothing_from_elsewhere_and_allows_nothing_else(client: httpx.Client) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    [script] = re.findall(r"<script[^>]*>([^<]+)</script>", answer.text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert (answer.headers["x-frame-options"], answer.headers["cache-control"]) == ("DENY", "no-store")
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", answer.text)
    for path in re.findall(r'"(/static/[^"]+)"', answer.text):
        assert client.get(path).status_code == 200


def test_a_token_is_needed_where_others_can_reach_the_server(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 10)
    with served(tmp_path, host="0.0.0.0", token="secret") as site, httpx.Client(base_url=site.address) as client:
        for path in ("/", "/api/runs", "/static/app.js", "/api/runs?token=secret"):
            answer = client.get(path)
            assert (answer.status_code, "one" in answer.text.split()) == (401, False)
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/?token=secret").headers["location"] == "/"
        assert client.get("/api/runs").status_code == 200  # by the cookie


def test_feedback_is_stored_as_by_its_own_page(tmp_path: Path) -> None:
    """A rating and a better answer, with the exact tokens; looking alone creates nothing."""
    run = feedback_runs.make_run(tmp_path / "runs" / "apples")
    [original] = [one for one in feedback_runs.groups_of(2) if one.id == "main-000005/1"]
    about = {"run": "apples", "id": original.id}
    with served(tmp_path / "runs") as site, httpx.Client(base_url=site.address, timeout=60) as client:
        assert ask(client, "feedback", **about) == {"author": "ann", "said": []}
        assert not (run / "buffer.sqlite").exists()
        for row in ({"rating": 0.25}, {"rating": 0.75}, {"text": "13 and 3 is 16"}):
            body = {"completion": original.id, "step": 2} | row
            client.post("/api/feedback", params={"run": "apples"}, json=body).raise_for_status()
        said = ask(client, "feedback", **about)["said"]
        assert [(each["act"], each["author"], each.get("rating")) for each in said] == [
            ("rate", "ann", 0.75),
            ("edit", "ann", None),
        ]
        undo = {"run": "apples", "id": said[1]["id"]}
        client.delete("/api/feedback", params=undo).raise_for_status()
        wrong = client.post("/api/feedback", params={"run": "apples"}, json={"completion": "nothing", "rating": 1})
        assert (wrong.status_code, "nothing" in wrong.json()["error"]) == (404, True)
        for content, kind in ((b"[1]", "application/json"), (b"{}", "text/plain")):
            headers = {"content-type": kind}
            refused = client.post("/api/feedback", params={"run": "apples"}, content=content, headers=headers)
            assert refused.status_code in (415, 422)
        evil = client.post(
            "/api/feedback", params={"run": "apples"}, json=body, headers={"origin": "http://evil.example"}
        )
        assert evil.status_code == 403
    found = feedback_runs.everything(open_feedback(run))
    [rated] = found["rated"]
    assert (rated.author, rated.experiences[0].reward) == ("ann", 0.75)
    assert rated.experiences[0].token_ids.tolist() == original.token_ids.tolist()
    assert found["expert"] == []


def test_the_temporary_tables_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_run(tmp_path / "runs" / "one", 10)
    with served(tmp_path / "runs") as site:
        httpx.get(f"{site.address}/api/rollouts", params={"run": "one"}).raise_for_status()
        [folder] = tmp_path.glob("rollmill-ui-*")
        assert [path.name for path in folder.iterdir()] == ["rollouts-1.sqlite"]
    assert list(tmp_path.glob("rollmill-ui-*")) == []
