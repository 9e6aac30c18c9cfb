"""What the site is made of: the pages of docs/ and the repository's own, each at its place.

The navigation is docs/README.md: each `##` heading is an entry at the top, with a page of its own
that holds what stands below it. Its lists are what the entry leads to, in groups by `###` headings.
An index, such as docs/decisions/README.md, is followed by the pages that it lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTENTS = DOCS / "README.md"
INDEXES = (DOCS / "decisions" / "README.md",)
HOME = ROOT / "README.md"

_ITEM = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<target>[^)#\s]+)\)", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?P<file>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)


class Section(NamedTuple):
    """An entry at the top.

    Attributes:
        title: its heading.
        text: what stands below the heading.
        groups: (heading, [(title, page), ...]); the first heading may be empty.
    """

    title: str
    text: str
    groups: list[tuple[str, list[tuple[str, Path]]]]

    @property
    def name(self) -> str:
        """Where its page is on the site."""
        return self.title.lower().replace(" ", "-")


def sections() -> list[Section]:
    """Return the navigation."""
    found = []
    for part in CONTENTS.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        groups = []
        for group in ("\n" + text).split("\n### "):
            heading, _, items = group.partition("\n")
            listed = list(_listed(items, DOCS))
            if listed:
                groups.append((heading, listed))
        found.append(Section(title, text.strip() + "\n", groups))
    return found


def _listed(text: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for item in _ITEM.finditer(text):
        page = (folder / item["target"]).resolve()
        yield item["title"], page
        if page in INDEXES:
            yield from _listed(page.read_text(encoding="utf-8"), page.parent)


def place_of(page: Path) -> str:
    """Return the place on the site of a file of the repository, without its suffix."""
    if page == HOME:
        return "index"
    if page == CONTENTS:
        return "guide"
    if page.is_relative_to(DOCS):
        return page.relative_to(DOCS).with_suffix("").as_posix().replace("README", "index")
    name = page.parent.name if page.name == "README.md" else page.stem.lower()
    return f"project/{name}"


def notebook_text(notebook: Path) -> str:
    """Return a notebook as markdown: its code, and what it keeps of the output."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = ("".join(output["text"]) for output in cell.get("outputs", ()))
        parts += [f"```text\n{shown}```" for shown in outputs]
    title, *rest = parts
    return "\n\n".join([title, f"The notebook itself: [{notebook.name}]({notebook.name})", *rest])


class Stage:
    """Writes the pages for Sphinx, each at its place, with links to the places of the others.

    Args:
        folder: where to.
        draw: what puts a Mermaid diagram onto a page: see `diagrams.draw`.
    """

    def __init__(self, folder: Path, draw: Callable[[str, Path, str], str]) -> None:
        self._folder = folder
        self._draw = draw
        listed = {p for s in sections() for _, items in s.groups for _, p in items}
        self._pages = {HOME, *listed}

    def write(self, more: dict[str, list[tuple[str, str]]]) -> None:
        """Write everything.

        Args:
            more: (title, place) of pages that are made otherwise, by the title of their section.
        """
        for page in sorted(self._pages):
            notebook = page.suffix == ".ipynb"
            text = notebook_text(page) if notebook else page.read_text(encoding="utf-8")
            if page == HOME:
                text += _toctree("", [(s.title, f"/{s.name}") for s in sections()])
            self.put(place_of(page), text, page)
        for section in sections():
            lists = [(h, [(t, f"/{place_of(p)}") for t, p in items]) for h, items in section.groups]
            lists += [("", [(t, f"/{place}") for t, place in more.get(section.title, ())])]
            text = section.text.replace("\n### ", "\n## ").removeprefix("#")
            trees = "".join(_toctree(heading, items) for heading, items in lists)
            self.put(section.name, f"# {section.title}\n\n{text}{trees}", CONTENTS)

    def put(self, place: str, text: str, page: Path) -> None:
        """Write one page, whose links are those of the file `page`."""
        target = self._folder / f"{place}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(self._changed(text, page, target.parent)), encoding="utf-8")

    def _changed(self, text: str, page: Path, folder: Path) -> Iterator[str]:
        """Return the text with other links and with pictures in place of diagrams, in parts."""

        def link(found: re.Match[str]) -> str:
            return found[0] if "://" in found[0] else self._link(found, page, folder)

        end = 0
        for fence in _FENCE.finditer(text):
            yield _LINK.sub(link, text[end : fence.start()])
            if fence["language"] == "mermaid":
                yield self._draw(fence["text"], folder, os.path.relpath(self._folder, folder))
            else:
                yield fence[0]
            end = fence.end()
        yield _LINK.sub(link, text[end:])

    def _link(self, found: re.Match[str], page: Path, folder: Path) -> str:
        target, anchor = (page.parent / found["file"]).resolve(), found["anchor"] or ""
        if target.is_dir():
            target /= "README.md"
        if target == CONTENTS and anchor:  # a heading there is a page here
            return os.path.relpath(self._folder / f"{anchor[1:]}.md", folder)
        to_itself = target == page and page.suffix == ".ipynb"  # for who wants it as it is
        if target in self._pages | {CONTENTS} and not to_itself:
            there = self._folder / f"{place_of(target)}.md"
        elif target == ROOT / "configs" / "README.md":
            there = self._folder / "configs.md"
        elif not target.is_file():
            return found[0]  # Sphinx says where this is
        else:  # a file to look at or to download
            there = self._folder / "files" / target.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, there)
        return os.path.relpath(there, folder) + anchor


def _toctree(caption: str, items: list[tuple[str, str]]) -> str:
    if not items:
        return ""
    # A number says nothing beside the text: there the page's own title is better.
    lines = [place if title.isdigit() else f"{title} <{place}>" for title, place in items]
    options = [":hidden:", f":caption: {caption}"] if caption else [":hidden:"]
    return "\n".join(["\n\n```{toctree}", *options, "", *lines, "```\n"])
