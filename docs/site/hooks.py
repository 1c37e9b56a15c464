"""Brings files outside docs/ into the site, and points the links of the pages at them.

The pages link to the examples, results and developers' pages of the repository by relative paths, as a reader of the
repository follows them. In the site, Markdown files become pages of their own, and other files are copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    **{f"libs/{path.name}/README.md": f"{path.name}.md" for path in sorted((ROOT / "libs").iterdir())},
}
FOLDERS = ("examples", "bench/results")
BOOSTS = {"faq.md": 6.0, "guide/": 2.0, "start.md": 2.0, "run-file/": 0.4, "changelog.md": 0.1, "api.md": 0.5}
"""Weight of pages in the search, by the beginning of their path: who searches asks how something is done, and the
reference has every word."""
_LINK = re.compile(r"(\]\(|href=\"|src=\")([^)\"#:\s]+)((?:#[^)\"]*)?[)\"])")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / source).read_text(), source, page)))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                place = str(path.relative_to(ROOT))
                files.append(File.generated(config, place, abs_src_path=str(path)))
    licence = File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text())
    files.append(licence)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    boost = next((weight for start, weight in BOOSTS.items() if place.startswith(start)), 1.0)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    return markdown if place in PAGES.values() else _relinked(markdown, f"docs/{place}", place)


def _relinked(text: str, source: str, page: str) -> str:
    """Return the text with links that a reader of the repository can follow as links of the site.

    Args:
        source: path of the file in the repository.
        page: its path in the site.
    """

    def replaced(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), found[2]))
        place = _in_site(target)
        return found[0] if place is None else found[1] + os.path.relpath(place, os.path.dirname(page) or ".") + found[3]

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])


def _in_site(target: str) -> str | None:
    """Return where the site has a file or folder of the repository; None for what it does not have."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in PAGES:
        return PAGES[target]
    if target == "LICENSE":
        return "LICENSE.txt"
    if (ROOT / target).is_dir():
        return "bench.md" if target.startswith("bench") else "cookbook.md"
    if target.startswith("libs/"):  # a file of a library: its page names it
        return PAGES.get("/".join([*target.split("/")[:2], "README.md"]))
    return target if target.startswith(FOLDERS) else None
