"""Mermaid diagrams as pictures, by mermaid's own code: the pages need no script for them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import mermaidx

_THEMES = {"light": "neutral", "dark": "dark"}


def draw(source: str, folder: Path, top: str) -> str:
    """Write a diagram into a folder, for light and for dark; return what shows it and links to it.

    Args:
        source: the diagram.
        folder: that of the page.
        top: the way from there to the top of the site.
    """
    name = hashlib.sha256(source.encode()).hexdigest()[:12]
    alt = "Diagram of states" if "stateDiagram" in source else "Diagram"
    shown = []
    for scheme, theme in _THEMES.items():
        file = folder / f"diagram-{name}-{scheme}.svg"
        svg = mermaidx.render(source, theme=theme).svg()
        # A picture has no width of its own if that is given in per cent.
        width = re.search(r'viewBox="\S+ \S+ (\S+) \S+"', svg)
        if width is None:
            raise ValueError(f"mermaid wrote no viewBox for {source.splitlines()[0]}")
        file.write_text(svg.replace('width="100%"', f'width="{width[1]}"', 1), encoding="utf-8")
        options = f":alt: {alt}\n:class: only-{scheme}\n:target: {top}/_images/{file.name}"
        shown.append(f"```{{image}} {file.name}\n{options}\n```")
    return "\n\n".join(shown)
