"""What is wrong with a site: links that lead nowhere, and what would come from the network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_FETCHED = frozenset(("canonical", "next", "prev", "search", "index", "author", "genindex"))
_STYLE = re.compile(r"""(?:@import\s+|url\()\s*["']?(?:https?:)?//""")


class _Page(HTMLParser):
    """Attributes: ids of its elements; links it has; fetched: what a browser loads with it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        attribute = _FETCHED.get(tag)
        if attribute in given and given.get("rel") not in _NOT_FETCHED:
            self.fetched.append(given[attribute])


def problems(folder: Path) -> list[str]:
    """Return what is wrong, a line for each."""
    files = (f for f in sorted(folder.rglob("*.html")) if "_static" not in f.parts)
    pages = {file: _Page(file) for file in files}
    found = []
    for file, page in pages.items():
        where = file.relative_to(folder)
        for link in [*page.links, *page.fetched]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.fetched and url.scheme != "data":
                    found.append(f"{where}: is loaded from the network: {link}")
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not target.exists():
                found.append(f"{where}: no such file: {link}")
            elif url.fragment and target in pages and url.fragment not in pages[target].ids:
                found.append(f"{where}: no such place: {link}")
    return found + [
        f"{file.relative_to(folder)}: loads from the network"
        for file in sorted(folder.rglob("*.css"))
        if _STYLE.search(file.read_text(encoding="utf-8"))
    ]
