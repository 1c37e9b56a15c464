"""A real headless browser for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

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


def press(page: Page, what: Locator | str) -> None:
    """Click, or press a key, and wait for the page that follows."""
    with page.expect_navigation(wait_until="load"):
        page.keyboard.press(what) if isinstance(what, str) else what.click()
