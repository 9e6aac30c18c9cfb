"""How Sphinx makes the site of what `build.py` has put together."""

from __future__ import annotations

from pathlib import Path

project = "envmgr"
html_title = "envmgr"
copyright = "The envmgr authors"
extensions = ["myst_parser"]
myst_heading_anchors = 4
exclude_patterns = ["files"]

highlight_language = "text"
pygments_style = "default"
html_theme = "pydata_sphinx_theme"
html_static_path = [str(Path(__file__).resolve().parent / "static")]
html_css_files = ["envmgr.css"]
html_copy_source = False
html_use_index = False
html_show_sourcelink = False
html_show_sphinx = False
html_sidebars = {"index": []}
html_theme_options = {
    "logo": {"text": "envmgr"},
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "navigation_depth": 2,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "default",
    "pygments_dark_style": "github-dark",
}
