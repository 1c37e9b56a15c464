"""The documentation as a site: its navigation, what newcomers look for, and the check of the built pages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from support.doc_blocks import ROOT

from bench.see_learn import markdown

DOCS = ROOT / "docs"
GENERATED = {"index.md", "bench.md", "contributing.md", "changelog.md"} | {
    f"{path.parent.name}.md" for path in ROOT.glob("libs/*/README.md")
}
"""Pages that docs/site/hooks.py makes of files outside docs/."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]*)(?:#([^)]*))?\)")


def navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from navigation(each)


def test_the_navigation_has_every_page_once() -> None:
    class Loader(yaml.SafeLoader): ...

    pages = list(navigation(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert len(pages) == len(set(pages))
    assert set(pages) - GENERATED == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_ten_tasks_of_newcomers_are_two_clicks_away() -> None:
    """The first click is the README's link to the questions, the second one a link of their table."""
    assert "(docs/faq.md)" in (ROOT / "README.md").read_text()
    page = (DOCS / "faq.md").read_text()
    rows = [line for line in page.split("\n\n## ")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        found = _LINK.search(row)
        assert found is not None, row
        target = DOCS / (found[1] or "faq.md")
        assert target.is_file(), row
        if found[2]:
            assert found[2] in anchors(target.read_text()), row


def test_goals_of_the_how_to_lead_to_sections() -> None:
    page = (DOCS / "how-to.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| goal ")]
    assert len(rows) > 40
    for row in rows:
        assert _LINK.search(row.split("|")[2]), row


def anchors(text: str) -> set[str]:
    """Ids of the headings of a page, as the site and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, DOCS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cookbook.py", "board.py"])
def test_the_page_shows_the_committed_results(name: str) -> None:
    done = subprocess.run([sys.executable, str(DOCS / name), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_differs_from_what_is_generated_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from generated_files import write_or_check; "
        "sys.exit(write_or_check([(Path(sys.argv[1]), 'new')], 'pages.py', sys.argv[2:]))"
    )
    file = tmp_path / "sub" / "page.md"

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-c", program, str(file), *arguments]
        done = subprocess.run(command, cwd=DOCS, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert run("--check") == (1, f"{file} is out of date; run: python docs/pages.py\n")
    assert run() == (0, "")
    assert file.read_text() == "new"
    assert run("--check") == (0, "")


def test_the_page_on_policies_that_see_shows_the_committed_results() -> None:
    rows = markdown(json.loads((ROOT / "bench/results/see_learn.json").read_text()))
    assert "\n".join(rows) in (DOCS / "guide/vision-language.md").read_text()


def test_every_example_is_in_the_cookbook_or_the_first_run() -> None:
    pages = "".join((DOCS / name).read_text() for name in ("cookbook.md", "guide/first-run.md", "guide/preferences.md"))
    assert [
        path.name for path in sorted((ROOT / "examples").glob("*.yaml")) if f"examples/{path.name}" not in pages
    ] == []


def test_dead_links_and_files_of_other_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="sub/a.html#there">1</a> <a href="sub/a.html#gone">2</a> <a href="b.html">3</a>'
        '<a href="https://example.org/">4</a> <a href="/sub/a.html">5</a> <a href="#">6</a>'
        '<script src="https://example.org/x.js"></script> <img src="data:image/png;base64,AA">'
    )
    (tmp_path / "sub/a.html").write_text('<h1 id="there">A</h1> <a href="..">up</a>')
    (tmp_path / "s.css").write_text("@import url(https://example.org/font.css);")
    assert list(script("site/check_site.py").find_problems(tmp_path)) == [
        "index.html: sub/a.html#gone: a.html has no `gone`",
        "index.html: b.html: there is no such file",
        "index.html: loads https://example.org/x.js",
        "s.css: loads something from another host",
    ]
