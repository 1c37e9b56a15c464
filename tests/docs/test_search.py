"""The search of the built site answers what newcomers type, in a real browser."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from support.doc_blocks import ROOT

pytestmark = pytest.mark.service

SITE = ROOT / "build/site"
FIRST = 3
"""Results that somebody looks at."""
TYPED = {
    "train on my JSONL": ["faq.html#how-do-i-train-on-my-own-jsonl-file", "guide/tasksets.html#files"],
    "write my own reward": ["faq.html#how-do-i-write-my-own-reward", "guide/rewards.html#your-own-function"],
    "why is my reward flat": ["faq.html#why-is-my-reward-flat"],
    "resume with more steps": ["faq.html#how-do-i-resume-a-run-or-give-it-more-steps"],
    "out of memory": ["faq.html#how-do-i-make-it-fit-into-memory", "guide/restarts.html#out-of-memory"],
    "lora": ["faq.html#how-do-i-train-only-adapters-lora", "run-file/model.html#modellora"],
    "see completions": ["faq.html#how-do-i-see-what-the-model-wrote", "guide/first-run.html#inspecting-the-run"],
    "several gpus": ["faq.html#how-do-i-use-several-gpus-or-several-hosts", "guide/ranks.html"],
    "wandb": ["guide/trackers.html"],
    "use my trained model elsewhere": ["faq.html#how-do-i-use-the-trained-model-elsewhere", "guide/export.html"],
    "export model": ["guide/export.html"],
}
"""What they type, and the pages that answer it."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The built site at an address. Skips where it is not built, or older than the pages."""
    index = SITE / "search/search_index.json"
    if not index.is_file():
        pytest.skip("the site is not built: make docs")
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs/site").glob("*.py"), ROOT / "mkdocs.yml"]
    newest = max(path.stat().st_mtime for path in sources)
    if index.stat().st_mtime < newest:
        pytest.skip("the built site is older than the documentation: make docs")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def page(browser: Browser, site: str) -> Page:
    opened = browser.new_context(base_url=site).new_page()
    opened.set_default_timeout(30_000)
    return opened


@pytest.mark.parametrize("typed", TYPED)
def test_what_newcomers_type_is_answered(page: Page, typed: str) -> None:
    """One of the first results, or a section that is shown with it, is the answer."""
    page.goto("index.html")
    page.goto(f"index.html?q={typed.replace(' ', '+')}")
    results = page.locator(".md-search-result__item")
    results.first.wait_for()
    links = results.evaluate_all(
        """all => all.map((one) => [...one.querySelectorAll("a")].map((a) => {
            const to = new URL(a.href);
            return to.pathname.slice(1) + to.hash;
        }))"""
    )
    found = [link for result in links[:FIRST] for link in result]
    assert set(found) & set(TYPED[typed]), found


def test_every_answer_is_a_page_of_the_documentation() -> None:
    for places in TYPED.values():
        for place in places:
            name = Path(place.partition("#")[0]).with_suffix(".md")
            assert (ROOT / "docs" / name).is_file(), place
