"""A real headless browser for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium as it is installed; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium here; install it (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def watched(browser: Browser, address: str, *, only_errors: bool = False, **options: Any) -> Iterator[Page]:
    """A page of a site. What goes wrong in it is the test's: errors of its scripts, and unless `only_errors` messages
    of its console, dialogs, and requests for other places."""
    context = browser.new_context(base_url=address, **options)
    context.set_default_timeout(30_000)
    opened, problems = context.new_page(), list[str]()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    if not only_errors:
        opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        opened.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(address) else None)
        opened.on("dialog", lambda dialog: problems.append(dialog.message))
    try:
        yield opened
    finally:
        context.close()
    assert problems == []


def nameless_controls(page: Page) -> list[str]:
    """The controls of a page that have no name for a screen reader, as HTML."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a")]
            .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    return found


def press(page: Page, what: Locator | str) -> None:
    """Click, or press a key, and wait for the page that follows."""
    with page.expect_navigation(wait_until="load"):
        page.keyboard.press(what) if isinstance(what, str) else what.click()
