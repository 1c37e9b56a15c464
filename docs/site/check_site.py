"""Checks the built site: every link and fragment leads somewhere, and no page loads anything from another host.

Usage: python docs/site/check_site.py SITE
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_LINKED = {"a": "href", **_LOADED}
_NOT_LOADED = {"canonical", "alternate", "next", "prev", "edit"}
_IN_STYLES = re.compile(r"(?:@import\s+|url\()[\"']?(https?:)?//", re.IGNORECASE)


class SitePage(HTMLParser):
    """Ids and links of a page; `loaded` are those that a browser fetches by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        target = values.get(_LINKED.get(tag, ""), "")
        if target:
            self.links.append(target)
            if tag in _LOADED and not _NOT_LOADED & set(values.get("rel", "").split()):
                self.loaded.append(target)


def find_problems(site: Path) -> Iterator[str]:
    """Yield every link to nothing, and everything that is loaded from another host."""
    pages = {path.resolve(): SitePage(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{where}: loads {link}"
                continue
            home = site if parts.path.startswith("/") else path.parent  # the page for 404 has paths of the server
            target = (home / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{where}: {link}: there is no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__top"}:
                yield f"{where}: {link}: {target.name} has no `{parts.fragment}`"
    for path in sorted(site.rglob("*.css")):
        if _IN_STYLES.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads something from another host"


if __name__ == "__main__":
    found = list(find_problems(Path(sys.argv[1])))
    print("\n".join(found))
    print(f"{len(found)} problems in {sys.argv[1]}")
    sys.exit(bool(found))
