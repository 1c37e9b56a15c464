"""Requests of every kind to every route of the feedback server: none makes it fail, none shows what it should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from support.feedback_runs import everything, make_run, served
from support.fuzzing import fuzz

from rollmill.apps.studio.feedback.app import make_app

IDS = ["main-000005/1", "main-000005/2", "main-000004/0", "../x", "", "\u202e"]
TEXT: dict[str, Any] = {"type": "string"}
FIELDS: dict[str, Any] = {
    **{name: {"enum": IDS} for name in ("completion", "better", "worse")},
    **{name: {"enum": ["2", "1", "-1", "x", "99999999999"]} for name in ("step", "page", "before")},
    "rating": {"enum": ["1", "0.5", "2", "x"]},
    **dict.fromkeys(("text", "key", "task", "at_least", "at_most", "order", "said", "author", "again"), TEXT),
    "group": {"enum": ["main-000005", "main-000004", "../x", ""]},
    "id": TEXT,
    "at": TEXT,
    "back": {"enum": ["group", "history", "/history", "//evil.example", "x"]},
    "token": TEXT,
}
ROW: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{name: {"enum": IDS} for name in ("completion", "better", "worse")},
        **dict.fromkeys(("author", "text", "prompt", "response", "chosen", "rejected", "task", "key"), TEXT),
        "rating": {"type": "number"},
        "step": {"type": "integer"},
    },
    "required": ["author"],
}


RATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "author": {"enum": ["ann", "bob"]},
        "completion": {"enum": IDS[:2]},
        "rating": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["author", "completion", "rating"],
}
FORMS = {
    "/rate": ["completion", "rating", "step", "group"],
    "/edit": ["completion", "text", "step", "group"],
    "/compare": ["better", "worse", "step", "group"],
    "/undo": ["id", "back"],
    "/name": ["author", "back"],
}


def description(app: Any, secret: str) -> dict[str, Any]:
    """An OpenAPI description of every route: what the server describes itself, and its pages and forms."""
    found: dict[str, Any] = app.app.openapi()
    row = {"schema": {"anyOf": [RATE, ROW, {"type": "array", "items": {"anyOf": [RATE, ROW]}}]}}
    found["paths"]["/feedback"]["post"]["requestBody"] = {"required": True, "content": {"application/json": row}}
    for route in app.app.routes:
        for method in route.methods - {"HEAD"}:
            if method.lower() in found["paths"].get(route.path, {}):
                continue
            operation: dict[str, Any] = {"responses": {"200": {"description": "a page"}}}
            if method == "GET":
                operation["parameters"] = [
                    {"name": name, "in": "query", "schema": each} for name, each in FIELDS.items()
                ]
            else:
                fields = {name: FIELDS[name] for name in (*FORMS[route.path], "at")} | {"secret": {"enum": [secret]}}
                form = {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": fields,
                    "required": ["secret", *FORMS[route.path]],
                }
                kind = "application/x-www-form-urlencoded"
                operation["requestBody"] = {"required": True, "content": {kind: {"schema": form}}}
            found["paths"].setdefault(route.path, {})[method.lower()] = operation
    return found


@pytest.mark.slow
def test_no_request_to_any_route_fails(tmp_path: Path) -> None:
    with served(make_run(tmp_path / "apples"), token="hush") as site:
        schema = schemathesis.openapi.from_dict(
            description(make_app(site.desk, site.guard, "ann"), site.guard.form_secret)
        )
        statuses = fuzz(schema, site.address, {"authorization": "Bearer hush"}, 25, secrets=["hush"])
        assert sum(statuses.values()) > 400
        assert statuses[200] > 50
        assert sum(map(len, everything(site.desk).values())) > 0, "some were right"
        assert httpx.get(f"{site.address}/health", headers={"authorization": "Bearer hush"}).json()["status"] == "ok"


@pytest.mark.slow
def test_who_has_no_key_changes_and_sees_nothing(tmp_path: Path) -> None:
    with served(make_run(tmp_path / "apples"), token="hush") as site:
        described = description(make_app(site.desk, site.guard, "ann"), site.guard.form_secret)
        secrets = ["hush", site.guard.form_secret, "apples"]
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "rollmill-token=wrong"}):
            statuses = fuzz(schemathesis.openapi.from_dict(described), site.address, headers, 8, secrets=secrets)
            assert set(statuses) <= {401, 403, 405}, statuses
        assert not any(everything(site.desk).values())
