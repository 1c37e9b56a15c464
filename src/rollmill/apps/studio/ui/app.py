"""The web application of `rollmill ui`: its page, and the JSON that the page's scripts ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.guard import RequestGuard
from rollmill.apps.serve.web.page_middleware import PageMiddleware
from rollmill.apps.studio.ui.catalog import RunCatalog
from rollmill.apps.studio.ui.comparison import config_difference, evaluation_differences, metric_differences
from rollmill.apps.studio.ui.feedback_desks import FeedbackDesks
from rollmill.apps.studio.ui.metric_columns import ColumnCache, Curve, Numbers, XAxis
from rollmill.apps.studio.ui.rollout_table import SORTS, RolloutQuery, RolloutTable
from rollmill.apps.studio.ui.run_details import pipeline_funnel, process_timeline, run_details, run_file, step_timeline
from rollmill.apps.studio.ui.seed_groups import compare_seeds, seed_groups
from rollmill.apps.studio.ui.token_view import DecoderCache, read_experience, token_page, turn_tree
from rollmill.errors import RollmillError
from rollmill.files import to_jsonable

_STATIC = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)
_SLICE_S = 0.25
"""Seconds that a request spends on reading rollout files."""
_TABLES, _PATHS, _LARGEST = 8, 200, 2**53
_BODY = 2**20

RolloutFolder = Literal["rollouts", "evaluations"]
Number = Annotated[int, Query(ge=0, le=_LARGEST)]
Names = Annotated[list[str], Query(max_length=_PATHS)]


class RunViews:
    """State that the server keeps of the runs that were looked at.

    Args:
        folder: where the tables of rollouts are made; the caller removes it.
        author: of feedback.
    """

    def __init__(self, catalog: RunCatalog, folder: Path, author: str) -> None:
        self.catalog, self._folder = catalog, folder
        self.columns, self.decoders = ColumnCache(), DecoderCache()
        self.desks = FeedbackDesks(catalog, author)
        self._lock, self._number = threading.Lock(), 0
        self._tables: OrderedDict[Path, tuple[RolloutTable, Path]] = OrderedDict()

    def table(self, run_dir: Path, of: RolloutFolder) -> RolloutTable:
        """Return the table of a run's rollouts or evaluations; the oldest table is given up if there are many."""
        folder = run_dir / of
        with self._lock:
            found = self._tables.get(folder)
            if found is None:
                self._number += 1
                path = self._folder / f"rollouts-{self._number}.sqlite"
                found = RolloutTable(folder, path, partial(self._versions, run_dir), self.catalog.check_links), path
                self._tables[folder] = found
            self._tables.move_to_end(folder)
            while len(self._tables) > _TABLES:
                _, (table, path) = self._tables.popitem(last=False)
                table.close()
                path.unlink(missing_ok=True)
            return found[0]

    def close(self) -> None:
        """Close all tables and databases."""
        self.desks.close()
        with self._lock:
            for table, _ in self._tables.values():
                table.close()
            self._tables.clear()

    def _versions(self, run_dir: Path) -> dict[int, int]:
        """Version of the weights that each step's update began with: one less than the step's own in the metrics."""
        with self.columns.lock(run_dir):
            steps, versions = self.columns.get(run_dir).values("version")
        return {int(step): int(version) - 1 for step, version in zip(steps, versions, strict=True)}


def make_app(views: RunViews, guard: RequestGuard) -> PageMiddleware:
    """Builds the application for the runs of a folder."""
    app = FastAPI(title="rollmill ui", openapi_url=None)
    _add_errors(app)
    _add_runs(app, views)
    _add_rollouts(app, views)
    _add_feedback(app, views)
    _add_comparison(app, views)
    page = _add_page(app)
    policy = {"script-src": f"'self' '{_script_hash(page)}'", "connect-src": "'self'", "img-src": "'self' data:"}
    return PageMiddleware(app, guard, _is_program, most_bytes=_BODY, policy=policy)


def _is_program(request: Request) -> bool:
    return request.url.path.startswith("/api/")


def _json(data: Any) -> Response:
    return Response(json.dumps(to_jsonable(data), allow_nan=False), media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RollmillError)
    async def failed(request: Request, error: RollmillError) -> Response:
        status = error.status if isinstance(error, RequestRefusedError) else 500
        return Response(json.dumps({"error": str(error)}), status, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        return Response(json.dumps({"error": str(error.detail)}), error.status_code, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()]
        return Response(json.dumps({"error": "; ".join(wrong)}), 422, media_type="application/json")


def _add_page(app: FastAPI) -> bytes:
    """Registers the page and its files; returns the page."""
    static = files("rollmill.apps.studio.ui").joinpath("static")
    page = static.joinpath("index.html").read_bytes()
    found = {name: static.joinpath(name).read_bytes() for name in _static_names(Path(str(static)))}

    @app.get("/")
    def index() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    @app.get("/static/{name:path}")
    def file(name: str) -> Response:
        if name not in found:
            raise RequestRefusedError(f"there is no file {name[:100]!r}", 404, code="no_file")
        return Response(found[name], media_type=_STATIC[os.path.splitext(name)[1]])

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return page


def _static_names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in _STATIC]


def _script_hash(page: bytes) -> str:
    """The hash by which a browser allows the page's only inline script, its import map."""
    found = _IMPORT_MAP.search(page)
    assert found is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1]).digest()).decode()


def _add_runs(app: FastAPI, views: RunViews) -> None:
    """Registers what is known of whole runs."""
    catalog, columns = views.catalog, views.columns

    @app.get("/api/runs")
    def runs() -> Response:
        """Lists all runs."""
        return _json({"root": str(catalog.root), "runs": [asdict(card) for card in catalog.cards()]})

    @app.get("/api/run")
    def run(run: str) -> Response:
        """Describes a run."""
        path = catalog.find(run)
        with columns.lock(path):
            details = run_details(path, columns.get(path))
        return _json({"card": asdict(catalog.card(path)), **details})

    @app.get("/api/config")
    def config(run: str) -> Response:
        """Returns the resolved run file."""
        return _json({"text": run_file(catalog.find(run))})

    @app.get("/api/curves")
    def curves(
        run: Names,
        key: Names,
        x: XAxis = "step",
        points: Annotated[int, Query(ge=2, le=5000)] = 600,
        low: float | None = None,
        high: float | None = None,
        stage: str | None = None,
    ) -> Response:
        """Points of some metrics of some runs."""
        found = []
        for name in run:
            path = catalog.find(name)
            with columns.lock(path):
                table = columns.get(path)
                for each in key:
                    curve = table.curve(each, x, points=points, low=low, high=high, stage=stage)
                    if len(curve.x):
                        found.append({"run": name, "key": each, **_points(curve)})
        return _json({"curves": found})

    @app.get("/api/funnel")
    def funnel(run: str, first: Number = 0, last: Number = _LARGEST) -> Response:
        """Sums what the pipeline did."""
        path = catalog.find(run)
        with columns.lock(path):
            return _json(pipeline_funnel(columns.get(path), first, last))

    @app.get("/api/timeline")
    def timeline(run: str, step: Number | None = None) -> Response:
        """Spans of a step."""
        return _json(step_timeline(catalog.find(run), step))

    @app.get("/api/processes")
    def processes(run: str, seconds: Annotated[float | None, Query(gt=0, le=_LARGEST)] = None) -> Response:
        """Returns what each process did lately."""
        return _json(process_timeline(catalog.find(run), seconds))

    @app.get("/api/checkpoints")
    def checkpoints(run: str) -> Response:
        """Lists the checkpoints of a run, without reading their contents."""
        return _json(_checkpoints(catalog.find(run)))

    @app.post("/api/verify")
    def verify(run: str, name: str) -> Response:
        """Reads every byte of a checkpoint, and compares it with the hashes."""
        return _json(_checkpoints(catalog.find(run), verify=True, name=name))


def _checkpoints(run_dir: Path, *, verify: bool = False, name: str | None = None) -> dict[str, Any]:
    from rollmill.orchestrator.checkpoint_listing import list_checkpoints

    return {"checkpoints": [asdict(each) for each in list_checkpoints(run_dir, verify=verify, name=name)]}


def _points(curve: Curve) -> dict[str, Any]:
    def short(values: Any) -> list[float] | None:
        return None if values is None else [float(f"{value:.7g}") for value in values]

    return {"x": curve.x.tolist(), "y": short(curve.y), "low": short(curve.low), "high": short(curve.high)}


def _add_rollouts(app: FastAPI, views: RunViews) -> None:
    """Registers the table of completions, and single ones."""
    catalog = views.catalog

    @app.get("/api/rollouts")
    def rollouts(
        run: str,
        of: RolloutFolder = "rollouts",
        text: Annotated[str, Query(max_length=1000)] = "",
        task: str | None = None,
        step: Number | None = None,
        source: str | None = None,
        stop: str | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        sort: Literal["newest", "oldest", "reward", "length", "staleness", "turns"] = "newest",
        descending: bool = True,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Searches the completions; `pending` files are not read yet, so that the page asks again."""
        assert sort in SORTS
        table = views.table(catalog.find(run), of)
        table.refresh(_SLICE_S)
        query = RolloutQuery(text, task, step, source, stop, at_least, at_most, sort, descending, offset, limit)
        return _json(table.find(query))

    @app.get("/api/rollout")
    def rollout(
        run: str, step: Number, offset: Number, id: str, start: Number = 0, of: RolloutFolder = "rollouts"
    ) -> Response:
        """Describes a completion with some of its tokens."""
        path = catalog.find(run)
        experience = read_experience(views.table(path, of).line(step, offset, id))
        return _json({"step": step, **token_page(experience, views.decoders.get(path), start)})

    @app.get("/api/episode")
    def episode(run: str, step: Number, offset: Number, id: str, of: RolloutFolder = "rollouts") -> Response:
        """Describes the turns of a rollout, as a tree."""
        table = views.table(catalog.find(run), of)
        table.line(step, offset, id)
        offsets = table.episode(step, offset)
        found = [read_experience(table.line(step, each)) for each in offsets]
        return _json({"step": step, "trees": turn_tree(found, offsets)})


def _add_feedback(app: FastAPI, views: RunViews) -> None:
    """Registers feedback on completions. Other sites cannot send it: the guard checks where a request comes from."""
    catalog, desks = views.catalog, views.desks

    @app.get("/api/feedback")
    def said(run: str, id: str) -> Response:
        """Lists what was said about a completion."""
        return _json(desks.said(catalog.find(run), id))

    @app.post("/api/feedback")
    async def say(run: str, request: Request) -> Response:
        """Stores a rating or a better answer."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestRefusedError("send Content-Type: application/json", 415, code="no_json")
        body = await request.body()
        return _json(await run_in_threadpool(lambda: desks.say(catalog.find(run), body)))

    @app.delete("/api/feedback")
    def undo(run: str, id: str) -> Response:
        """Takes back what was said."""
        return _json(desks.undo(catalog.find(run), id))


def _add_comparison(app: FastAPI, views: RunViews) -> None:
    """Registers the comparison of two runs, and of their seeds."""
    catalog, columns = views.catalog, views.columns

    @app.get("/api/compare")
    def compare(a: str, b: str, first: Number = 0, last: Number = _LARGEST) -> Response:
        """Compares run files, metrics and evaluations."""
        one, other = catalog.find(a), catalog.find(b)
        if one == other:
            raise RequestRefusedError("choose two different runs", 422, code="same_run")
        low, high = sorted([one, other])
        with columns.lock(low), columns.lock(high):
            metrics = metric_differences(columns.get(one), columns.get(other), first, last)
        return _json(
            {
                "a": a,
                "b": b,
                "config": config_difference(one, other),
                "metrics": metrics,
                "evaluations": evaluation_differences(one, other),
            }
        )

    @app.get("/api/seeds")
    def seeds(a: str, b: str) -> Response:
        """Compares the settings of two runs over their seeds; null where neither was repeated."""
        one, other = catalog.find(a), catalog.find(b)
        groups = seed_groups(catalog.paths(), one, other)
        if groups is None:
            return _json(None)

        def values(run: Path) -> dict[str, tuple[Numbers, Numbers]]:
            with columns.lock(run):
                table = columns.get(run)
                return {key: table.values(key) for key in table.keys}

        found = compare_seeds(*groups, values)
        names = {side: {seed: catalog.card(run).id for seed, run in found[side].items()} for side in ("a", "b")}
        return _json(found | names)
