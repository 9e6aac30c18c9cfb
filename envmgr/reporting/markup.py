"""HTML whose texts are escaped wherever they come from, and figures as texts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from envmgr.untrusted import plain


class Html(str):
    """A text that is HTML; every other text is escaped where it becomes part of HTML."""

    __slots__ = ()


Part = str | Iterable["Part"]
"""A text, HTML, or several of these."""

_EMPTY = frozenset(("meta", "img"))


def escaped(part: Part) -> str:
    """Return a part as HTML."""
    if isinstance(part, Html):
        return part
    if isinstance(part, str):
        return html.escape(plain(part))
    return "".join(map(escaped, part))


def tag(name: str, /, *parts: Part, **attributes: str) -> Html:
    """Return an element.

    Args:
        name: name of the tag.
        *parts: content of the element.
        **attributes: attributes by name; an underscore at the end of a name is left out.
    """
    given = "".join(f' {key.rstrip("_")}="{escaped(str(v))}"' for key, v in attributes.items())
    end = "" if name in _EMPTY else f"</{name}>"
    return Html(f"<{name}{given}>{escaped(parts)}{end}")


def table(header: Sequence[str], rows: Iterable[Sequence[Part]]) -> Html:
    """Return a table; all cells except those of the first column are figures."""
    head = tag("tr", [tag("th", cell) for cell in header])
    body = [tag("tr", [tag("td", cell) for cell in row]) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="wide")


def folded(title: Part, *parts: Part) -> Html:
    """Return an element of which only the title is visible until it is clicked."""
    return tag("details", tag("summary", title), *parts)
