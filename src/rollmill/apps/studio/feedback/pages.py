"""HTML pages: lists of groups, completions of a group side by side, and the feedback history. Forms work without
scripts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode
from uuid import uuid4

from fastapi import FastAPI, Request
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.guard import CLIENT, TOKEN_CLIENT, RequestGuard
from rollmill.apps.serve.web.keys import ANYONE
from rollmill.apps.studio.feedback.rendering import CompletionCard, cards, escape_text
from rollmill.apps.studio.feedback.requests import FeedbackError, parse_author, parse_request
from rollmill.apps.studio.feedback.rollout_index import RolloutIndex, StoredGroup
from rollmill.apps.studio.feedback.service import FeedbackService
from rollmill.errors import RollmillError

# Lists of groups: filters, order and neighbours

SORT_ORDERS = {
    "stored": "training order",
    "unrated": "without feedback first",
    "disagreement": "largest reward difference first",
}
_ENOUGH_GROUPS, _MOST_STEPS = 50, 100


@dataclass(frozen=True)
class GroupFilters:
    """Filters and order of the list; None matches everything. A group passes if one of its rewards lies within the
    bounds."""

    step: int | None = None
    task: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    order: str = "stored"
    before: int | None = None  #: only earlier steps

    @classmethod
    def of(cls, query: Mapping[str, str]) -> GroupFilters:
        """Parses a query. Raises FeedbackError for an invalid value."""
        given: dict[str, Any] = {name: query[name].strip() for name in cls.__dataclass_fields__ if query.get(name)}
        for name, convert in (("step", int), ("before", int), ("at_least", float), ("at_most", float)):
            if name in given:
                try:
                    given[name] = convert(given[name])
                except ValueError as error:
                    raise FeedbackError(f"{name} is a number, not {given[name][:50]!r}") from error
        if given.get("order", "stored") not in SORT_ORDERS:
            raise FeedbackError(f"order is {', '.join(SORT_ORDERS)}, not {given['order'][:50]!r}")
        return cls(**given)

    def query(self) -> dict[str, Any]:
        """Returns the query that `of` parses to these filters."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def passes(self, group: StoredGroup) -> bool:
        """Returns whether a group matches."""
        if self.task is not None and self.task != group.task:
            return False
        if self.at_least is None and self.at_most is None:
            return True
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return any(low <= reward <= high for reward in group.rewards)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in the list."""

    group: StoredGroup
    mean: float | None  #: reward
    said: int  #: number of feedback records


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A page of the list. `older` is the `before` of the next page; None if this is the last one."""

    rows: list[GroupRow]
    steps: list[int]  #: steps read for this page
    older: int | None


def list_groups(service: FeedbackService, filters: GroupFilters) -> GroupPage:
    """Lists groups of the newest steps, whole steps at a time, up to about 50 groups or 100 steps."""
    said: dict[tuple[int | None, str], int] = {}
    for act in service.acts.all():
        if act.undone_by is None:
            said[act.step, act.group] = said.get((act.step, act.group), 0) + 1
    matching = [
        step
        for step in reversed(service.stored.steps())
        if filters.step in (None, step) and (filters.before is None or step < filters.before)
    ]
    rows: list[GroupRow] = []
    looked: list[int] = []
    for step in matching[:_MOST_STEPS]:
        looked.append(step)
        for group in service.stored.groups(step):
            if filters.passes(group):
                mean = statistics.fmean(group.rewards) if group.rewards else None
                rows.append(GroupRow(group, mean, said.get((step, group.name), 0)))
        if len(rows) >= _ENOUGH_GROUPS:
            break
    if filters.order == "unrated":
        rows.sort(key=lambda row: row.said > 0)
    elif filters.order == "disagreement":
        rows.sort(key=lambda row: -row.group.spread)
    return GroupPage(rows, looked, looked[-1] if len(looked) < len(matching) else None)


def find_neighbours(stored: RolloutIndex, step: int, name: str) -> tuple[StoredGroup | None, StoredGroup | None]:
    """Returns the previous and next group, across steps. Raises FeedbackError if `name` does not exist."""
    here = stored.groups(step)
    place = next((index for index, group in enumerate(here) if group.name == name), None)
    if place is None:
        raise FeedbackError(f"step {step} has no group {name!r}", status=404)
    steps = stored.steps()
    earlier = [other for other in steps if other < step]
    later = [other for other in steps if other > step]
    before = here[place - 1] if place else _end(stored, earlier[-1:], -1)
    after = here[place + 1] if place + 1 < len(here) else _end(stored, later[:1], 0)
    return before, after


def _end(stored: RolloutIndex, steps: list[int], index: int) -> StoredGroup | None:
    groups = stored.groups(steps[0]) if steps else []
    return groups[index] if groups else None


# Pages

AUTHOR_COOKIE = "rollmill-author"
_STATIC = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_MOST_FIELDS, _HISTORY = 50, 100


class FeedbackPages:
    """The pages of one server. `author` is the default name of their user."""

    def __init__(self, service: FeedbackService, guard: RequestGuard, author: str) -> None:
        self._service, self._guard, self._author = service, guard, author
        self._environment = Environment(
            loader=ChoiceLoader(
                [PackageLoader("rollmill.apps.studio.feedback"), PackageLoader("rollmill.apps.studio.report")]
            ),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {"shown": escape_text, "number": _number, "when": _when}
        self._environment.globals |= {"group_link": group_link, "form_secret": guard.form_secret}

    def add_to(self, app: FastAPI) -> None:
        """Registers the pages, their forms and their files."""
        for path, page in (("/", self.index), ("/group", self.group), ("/history", self.history)):
            app.get(path, include_in_schema=False)(page)
        for path, act in (
            ("/rate", self._act_form(("completion", "rating", "step"))),
            ("/edit", self._act_form(("completion", "text", "step"))),
            ("/compare", self._act_form(("better", "worse", "step"))),
            ("/undo", self._change_form),
            ("/name", self._name_form),
        ):
            app.post(path, include_in_schema=False)(self._form(act))
        for name, kind in _STATIC.items():
            app.get(f"/static/{name}", include_in_schema=False)(_file(name, kind))

    def error(self, request: Request, message: str, status: int, kept: str | None = None) -> Response:
        """Returns an error page that keeps the text that was typed."""
        return self._render("error.html.j2", request, status, message=message, kept=kept)

    def index(self, request: Request) -> Response:
        """Returns the filtered list of groups."""
        filters = GroupFilters.of(request.query_params)
        found = list_groups(self._service, filters)
        older = urlencode(filters.query() | {"before": found.older}) if found.older is not None else None
        steps = self._service.stored.steps()
        return self._render("list.html.j2", request, filters=filters, found=found, older=older, steps=steps)

    def group(self, request: Request) -> Response:
        """Returns the page with all completions of a prompt."""
        step, name = _whole(request.query_params.get("step", ""), "step"), request.query_params.get("group", "")
        experiences = self._service.stored.group(step, name)
        author = self._name(request)
        shown: list[CompletionCard] = cards(experiences, self._service.acts.all(), author)
        said = self._service.acts.get(request.query_params.get("said", ""))
        before, after = find_neighbours(self._service.stored, step, name)
        return self._render(
            "group.html.j2",
            request,
            step=step,
            group=name,
            prompt=experiences[0].prompt,
            task=experiences[0].task_id,
            cards=shown,
            numbers={card.experience.id: number for number, card in enumerate(shown, start=1)},
            said=said,
            before=before,
            after=after,
            new_key=lambda: uuid4().hex,
        )

    def history(self, request: Request) -> Response:
        """Returns the page of all feedback, newest first."""
        page = _whole(request.query_params.get("page") or "1", "page")
        acts = self._service.acts.all()[::-1]
        first = (max(1, page) - 1) * _HISTORY
        more = len(acts) > first + _HISTORY
        return self._render(
            "history.html.j2", request, acts=acts[first : first + _HISTORY], total=len(acts), page=page, more=more
        )

    # -- forms -------------------------------------------------------------------------------------------------

    def _form(self, act: Callable[[Request, dict[str, str]], Response]) -> Callable[..., Any]:
        async def handle(request: Request) -> Response:
            body = await request.body()
            return await run_in_threadpool(answer, request, body)

        def answer(request: Request, body: bytes) -> Response:
            form = _fields(request, body)
            try:
                self._guard.check_form(form)
                return act(request, form)
            except RollmillError as error:
                status = error.status if isinstance(error, RequestRefusedError) else 500
                return self.error(request, str(error), status, form.get("text"))

        return handle

    def _act_form(self, names: tuple[str, ...]) -> Callable[[Request, dict[str, str]], Response]:
        def act(request: Request, form: dict[str, str]) -> Response:
            row: dict[str, Any] = {name: form[name] for name in (*names, "key") if name in form}
            missing = [name for name in names if name not in row]
            if missing:
                raise FeedbackError(f"the form lacks `{missing[0]}`: choose one")
            row["step"] = _whole(row["step"], "step")
            if "rating" in row:
                row["rating"] = _rating(row["rating"])
            done = self._service.submit([parse_request(row | {"author": self._name(request)})])
            return _to_group(row["step"], form.get("group", ""), done.ids[0], form.get("at", ""))

        return act

    def _change_form(self, request: Request, form: dict[str, str]) -> Response:
        """Undoes or redoes feedback."""
        id = form.get("id", "")
        if form.get("again"):
            self._service.redo(id)
        else:
            self._service.undo(id, self._name(request))
        if form.get("back") == "history":
            return RedirectResponse(f"/history?page={_whole(form.get('page', '1'), 'page')}", status_code=303)
        return _to_group(_whole(form.get("step", ""), "step"), form.get("group", ""), id, form.get("at", ""))

    def _name_form(self, request: Request, form: dict[str, str]) -> Response:
        response = RedirectResponse(_local(form.get("back", "/")), status_code=303)
        name = quote(parse_author(form.get("author", "")))
        response.set_cookie(AUTHOR_COOKIE, name, httponly=True, samesite="strict", max_age=365 * 86400)
        return response

    # -- responses ---------------------------------------------------------------------------------------------

    def _name(self, request: Request) -> str:
        client: str = request.scope[CLIENT]
        own = self._author if client in (ANYONE, TOKEN_CLIENT) else client
        return unquote(request.cookies.get(AUTHOR_COOKIE, "")) or own

    def _render(self, template: str, request: Request, status: int = 200, **context: Any) -> Response:
        here = request.url.path + ("?" + request.url.query).rstrip("?")
        context |= {
            "run": self._service.stored.run_dir.resolve().name,
            "author": self._name(request),
            "here": here if request.method == "GET" else "/",
        }
        page = self._environment.get_template(template).render(context)
        body = page.encode("utf-8", "replace")  # a completion may hold lone surrogates
        return Response(body, status, media_type="text/html; charset=utf-8")


def group_link(step: int, group: str, said: str = "", at: str = "") -> str:
    """Returns the address of a group's page."""
    return "/group?" + urlencode({"step": step, "group": group} | ({"said": said} if said else {})) + (at and f"#{at}")


def _to_group(step: int, group: str, said: str, at: str) -> Response:
    place = at if at.isascii() and at.isalnum() else ""
    return RedirectResponse(group_link(step, group, said, place), status_code=303)


def _local(path: str) -> str:
    """Returns a path of this server, to prevent redirects to other sites."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def _fields(request: Request, body: bytes) -> dict[str, str]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        raise FeedbackError("send a form", status=415)
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise FeedbackError(f"the form cannot be read: {error}") from error
    return {name: value.replace("\r\n", "\n") for name, value in pairs}  # browsers send line breaks as CR LF


def _file(name: str, kind: str) -> Callable[[], Response]:
    content = files("rollmill.apps.studio.feedback").joinpath("static", name).read_bytes()

    def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise FeedbackError(f"{name} is a whole number, not {text[:50]!r}")
    return int(text)


def _rating(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise FeedbackError(f"rating is a number from 0 to 1, not {text[:50]!r}") from error


def _number(value: float | None) -> str:
    return "no reward" if value is None else f"{value:.4g}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
