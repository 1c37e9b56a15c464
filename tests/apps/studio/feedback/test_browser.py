"""A person at the page, in a real browser: what is done there, and nothing else, stands in the store."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page
from support.browser import nameless_controls, press, watched
from support.feedback_runs import END, TOKENIZER, Served, completion, everything, groups_of, of_kind

from rollmill.buffer import ExperienceKind
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import ExperienceSource

pytestmark = pytest.mark.service

GROUP = "/group?step=2&group=main-000005"
NOTHING: dict[str, list[Any]] = {"rated": [], "expert": [], "preference": []}
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "</textarea><script>window.pwned = 1</script>",
    "</pre></title></style><img src=x onerror='window.pwned = 1'>",
    '"><svg onload="window.pwned = 1">',
    "' autofocus onfocus='window.pwned = 1",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:window.pwned=1",
    "\n\nleading lines, \x1b[2J\x07 and \x00",
    "safe \u202etxt.exe\u2066 \u200f\u200b\ufeff\U000e0041",
    "&lt;b&gt; &amp; \ud800",
]


@pytest.fixture(params=["scripts", "no scripts"])
def page(browser: Browser, site: Served, request: pytest.FixtureRequest) -> Iterator[Page]:
    context = browser.new_context(base_url=site.address, java_script_enabled=request.param == "scripts")
    context.set_default_timeout(15_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def scripted(browser: Browser, site: Served) -> Iterator[Page]:
    """A page with scripts, whose errors are the test's."""
    with watched(browser, site.address, only_errors=True) as opened:
        yield opened


def tokens(site: Served, kind: ExperienceKind) -> list[list[list[int]]]:
    return [[one.token_ids.tolist() for one in group.experiences] for group in of_kind(site.desk, kind)]


def test_rate_edit_compare_undo(page: Page, site: Served) -> None:
    """All acts of the page; what training would read are exactly these groups, with exact tokens."""
    originals = {one.id: one for one in groups_of(2)}
    page.goto("/")
    press(page, page.get_by_role("link", name="How many apples are 13 and 3?").first)
    cards = page.locator("article")
    assert cards.count() == 4
    assert "0.25" in cards.nth(3).inner_text()

    press(page, cards.nth(1).get_by_role("button", name="2 of 5 stars: 0.25"))
    assert "Saved: ann rated it 0.25" in page.get_by_role("status").inner_text()
    press(page, cards.nth(0).get_by_role("button", name="5 of 5 stars: 1.0"))

    cards.nth(3).get_by_text("Write a better answer").click()
    box = cards.nth(3).get_by_label("Expert answer")
    assert box.input_value() == "  I do not\n\tknow  "
    box.fill("\n13 and 3\nis 16.")
    press(page, cards.nth(3).get_by_role("button", name="Save answer"))
    assert "ann wrote a better answer" in page.get_by_role("status").inner_text()

    cards.nth(2).get_by_label("better", exact=True).check()
    cards.nth(1).get_by_label("worse", exact=True).check()
    press(page, page.get_by_role("button", name="Save comparison"))
    assert "ann preferred completion 3 to completion 2" in page.get_by_role("status").inner_text()

    first, second = of_kind(site.desk, ExperienceKind.RATED)
    for group, id, reward in ((first, "main-000005/1", 0.25), (second, "main-000005/0", 1.0)):
        [one] = group.experiences
        assert (group.author, group.info["of"], one.reward, one.source) == (
            "ann",
            [id],
            reward,
            ExperienceSource.ROLLOUT,
        )
        for name in ("token_ids", "logprobs", "versions", "action_mask"):
            assert np.array_equal(getattr(one, name), getattr(originals[id], name))
    prompt = TOKENIZER.encode("How many apples are 13 and 3?\n")
    assert tokens(site, ExperienceKind.EXPERT) == [[[*prompt, *TOKENIZER.encode("\n13 and 3\nis 16."), END]]]
    pair = [originals[id].token_ids.tolist() for id in ("main-000005/2", "main-000005/1")]
    assert tokens(site, ExperienceKind.PREFERENCE) == [pair]
    assert [one.reward for one in of_kind(site.desk, ExperienceKind.PREFERENCE)[0].experiences] == [1.0, 0.0]

    press(page, page.get_by_role("status").get_by_role("button", name="Undo"))
    assert "Undone" in page.get_by_role("status").inner_text()
    assert tokens(site, ExperienceKind.PREFERENCE) == []
    press(page, page.get_by_role("link", name="History"))
    rows = page.locator("tbody tr")
    assert rows.count() == 4
    assert "undone by ann" in rows.nth(0).inner_text()
    press(page, rows.nth(1).get_by_role("button", name="Undo"))
    assert tokens(site, ExperienceKind.EXPERT) == []
    press(page, rows.nth(0).get_by_role("button", name="Redo"))
    assert tokens(site, ExperienceKind.PREFERENCE) == [pair]
    assert [group.info["rating"] for group in of_kind(site.desk, ExperienceKind.RATED)] == [0.25, 1.0]


def test_everything_by_keyboard(scripted: Page, site: Served) -> None:
    page = scripted
    page.goto("/group?step=2&group=main-000004")
    press(page, "n")
    page.keyboard.press("j")
    press(page, "4")
    assert page.evaluate("document.activeElement.id") == "c2"
    page.keyboard.press("b")
    page.keyboard.press("j")
    page.keyboard.press("w")
    press(page, "s")
    page.get_by_text("preferred completion 2 to completion 3").first.wait_for()
    press(page, "u")
    page.get_by_text("Undone:").wait_for()
    page.keyboard.press("e")
    page.keyboard.press("Control+a")
    page.keyboard.type("15 jkbwsu?")
    press(page, "Control+Enter")
    page.get_by_text("Saved: ann wrote a better answer").wait_for()
    page.keyboard.press("?")
    assert page.get_by_text("next, previous completion").is_visible()
    found = everything(site.desk)
    assert [group.info["rating"] for group in found["rated"]] == [0.75]
    assert [group.experiences[0].response for group in found["expert"]] == ["15 jkbwsu?"]
    assert found["preference"] == []


def test_hostile_text_is_shown_and_does_nothing(scripted: Page, site: Served, tmp_path: Path) -> None:
    """Markup, attributes, templates, escape codes and direction marks in every place that a page shows."""
    hostile = []
    for number, text in enumerate(HOSTILE):
        one = completion(3, f"group {HOSTILE[3]} {HOSTILE[8]}", number, "prompt", f"answer {number}", 0.5)
        one.id, one.response, one.task_id = f"{text}/{number}", text, f"{HOSTILE[0]} {text}"
        one.reward_parts, one.info = {text: 0.5}, {"outcomes": {text: text}}
        one.turns[-1].text, one.prompt = text, " ".join(HOSTILE)
        hostile.append(one)
    RolloutLog(site.desk.stored.run_dir / "rollouts").write(3, hostile)
    asked: list[str] = []
    scripted.on("request", lambda request: asked.append(request.url))
    scripted.on("dialog", lambda dialog: asked.append(dialog.message))
    scripted.goto("/?step=3")
    press(scripted, scripted.locator("tbody a").first)
    cards = scripted.locator("article")
    assert cards.count() == len(HOSTILE)
    for number, text in enumerate(HOSTILE):
        scripted.locator(f"#c{number + 1} .edit summary").click()
        typed = cards.nth(number).locator("textarea").input_value()
        assert typed == text.replace("\x00", "\ufffd").replace("\ud800", "?")  # as HTML can hold it
    shown = cards.locator(".answer").all_inner_texts()
    assert shown[:7] == HOSTILE[:7]
    assert shown[7] == "\n\nleading lines, \\x1b[2J\\x07 and \\x00"
    assert shown[8] == "safe \\u202etxt.exe\\u2066 \\u200f\\u200b\\ufeff\\U000e0041"
    assert shown[9] == "&lt;b&gt; &amp; \\ud800"
    press(scripted, cards.nth(1).get_by_role("button", name="1 of 5 stars"))
    scripted.get_by_role("status").wait_for()
    scripted.locator("#author").fill(HOSTILE[3])
    press(scripted, scripted.get_by_role("button", name="Change"))
    press(scripted, cards.nth(0).get_by_role("button", name="3 of 5 stars"))
    scripted.goto("/history")
    assert "svg onload" in scripted.locator("tbody").inner_text()
    scripted.goto("/?task=" + HOSTILE[3])
    assert scripted.evaluate("window.pwned") is None
    assert [url for url in asked if not url.startswith(site.address)] == []
    assert [group.info["of"] for group in of_kind(site.desk, ExperienceKind.RATED)] == [
        [hostile[1].id],
        [hostile[0].id],
    ]


def test_inline_scripts_are_blocked_even_if_they_got_in(scripted: Page) -> None:
    scripted.goto(GROUP)
    scripted.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.pwned = 1";
            document.body.append(script);
            const image = document.createElement("div");
            image.innerHTML = "<img src='data:,' onerror='window.pwned = 1'><a style='position:fixed'>x</a>";
            document.body.append(image);
        }"""
    )
    scripted.wait_for_timeout(100)
    assert scripted.evaluate("window.pwned") is None


@contextmanager
def other_site(html: Callable[[int], str]) -> Iterator[str]:
    """A server of another site: its address begins with another name than that of the page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = html(0).encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://localhost:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_of_another_site_can_do_nothing(scripted: Page, site: Served) -> None:
    """It sends forms and JSON in every way it may; even one that has stolen the secret of the page's forms."""
    rate = {"secret": site.guard.form_secret, "completion": "main-000005/1", "rating": "1", "step": "2"}
    fields = "".join(f"<input name={name} value='{value}'>" for name, value in rate.items())
    post = json.dumps({"author": "evil", "completion": "main-000005/1", "rating": 1})
    html = f"""<form id=f method=post target=frame action="{site.address}/rate">{fields}</form>
    <iframe name=frame></iframe><iframe id=inside src="{site.address}{GROUP}"></iframe>
    <script>
      const url = "{site.address}/feedback", body = {json.dumps(post)}, results = [];
      document.getElementById("f").submit();
      const ways = [
        {{method: "POST", mode: "no-cors", body}},
        {{method: "POST", mode: "cors", body, headers: {{"content-type": "application/json"}}}},
        {{method: "POST", mode: "no-cors", body: new Blob([body], {{type: "text/plain"}})}},
        {{method: "GET", mode: "cors"}},
      ];
      Promise.allSettled(ways.map((way) => fetch(url, way).then((answer) => answer.text()))).then((all) => {{
        document.title = "done " + all.filter((one) => one.status === "fulfilled" && one.value.includes("ids")).length;
      }});
    </script>"""
    with other_site(lambda _: html) as address:
        statuses = []
        scripted.on("response", lambda answer: statuses.append((answer.request.method, answer.url, answer.status)))
        scripted.goto(address)
        scripted.wait_for_function("document.title.startsWith('done')")
        scripted.wait_for_load_state("networkidle")
        assert scripted.title() == "done 0"
        inside = scripted.frames[2]
        assert inside.locator("article").count() == 0
    assert ("POST", f"{site.address}/rate", 403) in statuses
    assert everything(site.desk) == NOTHING


def test_two_people_at_once(browser: Browser, site: Served) -> None:
    """Each sees what the other said after a reload, under the right name."""
    contexts = [browser.new_context(base_url=site.address) for _ in range(2)]
    ann, bob = (context.new_page() for context in contexts)
    ann.goto(GROUP)
    bob.goto(GROUP)
    bob.locator("#author").fill("bob")
    press(bob, bob.get_by_role("button", name="Change"))
    for page, star in ((ann, "1 of 5"), (bob, "4 of 5"), (ann, "2 of 5")):
        press(page, page.locator("article").nth(0).get_by_role("button", name=star))
    bob.reload()
    said = bob.locator("#c1 .said-of").inner_text()
    assert "ann rated it 0.25" in said
    assert "bob rated it 0.75" in said
    assert "0 " not in said.replace("0.25", "").replace("0.75", "").partition(" 20")[0]
    assert [(group.author, group.info["rating"]) for group in of_kind(site.desk, ExperienceKind.RATED)] == [
        ("bob", 0.75),
        ("ann", 0.25),
    ]
    for context in contexts:
        context.close()


def test_a_run_that_is_still_writing(page: Page, site: Served) -> None:
    folder = site.desk.stored.run_dir / "rollouts"
    page.goto("/")
    assert page.locator("tbody tr").count() == 4
    RolloutLog(folder).write(3, groups_of(3))
    page.reload()
    assert page.locator("tbody tr").count() == 6
    press(page, page.locator("tbody a").first)
    shutil.rmtree(folder)  # a run started afresh in the same place
    press(page, page.locator("article").nth(0).get_by_role("button", name="1 of 5 stars"))
    assert "stores no completions of step 3" in page.get_by_role("alert").inner_text()
    page.goto("/")
    assert "No completions are stored yet" in page.locator("main").inner_text()
    assert everything(site.desk) == NOTHING


def test_the_page_is_accessible(scripted: Page) -> None:
    """Every control has a name, every page one main heading and a language."""
    for path in ("/", GROUP, "/history"):
        scripted.goto(path)
        assert nameless_controls(scripted) == []
        assert scripted.locator("h1").count() == 1
        assert scripted.evaluate("document.documentElement.lang") == "en"
