"""Makes the site of the docs: `make site`.

Some configs are run for the gallery. The pages are put together in FOLDER/source, Sphinx makes
FOLDER/html of them, and that is checked.
Every warning of Sphinx, every link that leads nowhere, and everything that a page would fetch from
the network is an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from checked import problems
from diagrams import draw
from gallery import make_gallery
from pages import ROOT, Stage
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).resolve().parent


def configs_page() -> str:
    """Every config of configs/, as it is."""
    parts = ["# Configs\n\nThe files of `configs/`. Run one: `envmgr run configs/cartpole.yaml`.\n"]
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        parts.append(f"## {file.name}\n\n```yaml\n{text}```\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the site; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="FOLDER")
    folder = parser.parse_args(argv).out.resolve()
    source, html, reports = folder / "source", folder / "html", folder / "reports"
    for old in (source, html, reports):
        shutil.rmtree(old, ignore_errors=True)
    stage = Stage(source, draw)
    stage.write({"Getting started": [("Gallery of reports", "gallery"), ("Configs", "configs")]})
    stage.put("configs", configs_page(), ROOT / "configs" / "README.md")
    stage.put("gallery", make_gallery(folder / "runs", reports), HERE / "gallery.py")
    if sphinx(["-qW", "--keep-going", "-j", "auto", "-c", str(HERE), str(source), str(html)]):
        return 1
    shutil.copytree(reports, html / "gallery")
    found = problems(html)
    print("\n".join(found) or f"open {html / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
