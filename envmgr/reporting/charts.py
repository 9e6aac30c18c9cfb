"""Charts as SVG, by pygal. They have no script and take their colours from the page."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

from envmgr.reporting.markup import Html, tag
from envmgr.texts import short_time
from envmgr.untrusted import plain

N_COLOURS = 8
_PARTS = {"policy": 0, "env steps": 2, "env resets": 3, "computing": 2, "envmgr": 1, "queued": 4}
_PARTS["waiting"] = 7
"""Colours of what time is spent on, in the order in which it is drawn."""

_IN_A_ROW, _ROW = 4, 18
"""How many names a row of a legend holds, and the height of a row."""

_MOST_LABELS = 10
"""The most labels below a chart over whole numbers."""

_OF_FAILURES = 6
"""The colour of the dots for failures."""

_MARGIN = 20
"""The height of the lines, divided by this, is left free above and below them."""

Points = Sequence[tuple[float, float | None]]

_NOT_DRAWN = (ArithmeticError, ValueError, IndexError, TypeError)
"""What pygal raises for figures that no sound run has."""


def lines(
    title: str,
    unit: str,
    series: Mapping[str, Points],
    *,
    aside: Container[str] = (),
    failures: Sequence[float] = (),
) -> Html:
    """Return a chart of lines over seconds.

    Args:
        title: title above the chart.
        unit: unit of the values.
        series: points by name.
        aside: the names of the series that are drawn thinner.
        failures: when envs failed, drawn as dots along the bottom.
    """
    thin = {"show_dots": False, "stroke_style": {"width": 1, "dasharray": "4, 3"}}
    options: dict[str, Any] = {name: thin if name in aside else {} for name in series}
    how: dict[str, Any] = {"x_title": "seconds", "y_title": unit}
    heights = [y for points in series.values() for _, y in points if y is not None]
    if heights:
        bottom, _ = how["range"] = _with_margin(min(heights), max(heights))
    if failures and heights:
        how["colours"] = [*range(sum(map(bool, series.values()))), _OF_FAILURES]
        series = {**series, "failures": [(at, bottom) for at in failures]}
        options["failures"] = {"stroke": False, "dots_size": 4}
    return _chart("XY", title, series.items(), options, **how)


def _with_margin(lowest: float, highest: float) -> tuple[float, float]:
    """Return the range of a chart: a flat line, too, lies within it, not on its border."""
    with contextlib.suppress(*_NOT_DRAWN):
        margin = (highest - lowest) / _MARGIN or abs(highest) or 1.0
        return (lowest - margin, highest + margin)
    return (lowest, highest)  # what cannot be drawn is said below


def times(title: str, series: Mapping[str, Sequence[tuple[int, float | None]]], *, x: str) -> Html:
    """Return a chart of dots, with seconds on a logarithmic scale.

    Args:
        title: title above the chart.
        series: points by name, over whole numbers.
        x: what these whole numbers are.
    """
    logs = [(name, [(at, log10(y)) for at, y in points if y]) for name, points in series.items()]
    heights = [y for _, points in logs for _, y in points] or [0.0]
    lowest = floor(min(heights))
    decades = list(range(lowest, max(ceil(max(heights)), lowest + 1) + 1))
    how: dict[str, Any] = {"stroke": False, "y_labels": decades, "include_x_axis": False}
    over = [at for _, points in logs for at, _ in points] or [0]
    first, last = min(over), max(over)
    how["x_labels"] = list(range(first, last + 1, ceil((last - first + 1) / _MOST_LABELS)))
    how["xrange"] = (first - 0.5, last + 0.5)
    how["value_formatter"] = lambda y: short_time(10**y)
    return _chart("XY", title, logs, {}, x_title=x, **how)


def shares(title: str, bars: Mapping[str, Mapping[str, float]]) -> Html:
    """Return a chart of stacked bars, which show the shares of the parts of each.

    Args:
        title: title above the chart.
        bars: for the name of each bar, seconds by part.
    """
    names = [name for name in _PARTS if any(name in parts for parts in bars.values())]
    upwards = list(bars.values())[::-1]  # they are drawn from below
    series = [(name, [_share(name, parts) for parts in upwards]) for name in names]
    height = 110 + 32 * len(bars) + _ROW * ceil(len(names) / _IN_A_ROW)
    how = {"x_labels": [plain(name) for name in bars][::-1], "height": height}
    how["colours"] = [_PARTS[name] for name in names]
    return _chart("HorizontalStackedBar", title, series, {}, x_title="% of the time", **how)


def _share(name: str, parts: Mapping[str, float]) -> float | None:
    return 100 * parts[name] / (sum(parts.values()) or 1.0) if name in parts else None


def _chart(
    kind: str,
    title: str,
    series: Iterable[tuple[str, Sequence[Any]]],
    options: Mapping[str, Mapping[str, Any]],
    **how: Any,
) -> Html:
    """Return a chart with its title, or a text that says why it cannot be drawn."""
    known = [(name, values) for name, values in series if len(values)]
    if not known:
        return _figure(title, tag("p", "nothing was recorded", class_="dim"))
    try:
        pygal = _imported()
    except ImportError:
        return _figure(title, tag("p", "drawing it needs pygal: pip install pygal", class_="dim"))
    made = getattr(pygal, kind)(_config(pygal, len(known), how))
    with contextlib.suppress(*_NOT_DRAWN):
        for name, values in known:
            made.add(plain(name), list(values), **options.get(name, {}))
        return _figure(title, Html(_without_scripts(made)))
    return _figure(title, tag("p", "these figures cannot be drawn", class_="dim"))


def _imported() -> Any:
    import pygal

    # pygal adds an old-style importer for its plugins, which makes Python warn at each import.
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "pygal"]
    return pygal


def _figure(title: str, drawn: Html) -> Html:
    return tag("figure", tag("figcaption", title), drawn)


def _config(pygal: Any, n_series: int, how: Mapping[str, Any]) -> Any:
    n_rows = ceil(n_series / _IN_A_ROW)
    numbers = how.get("colours") or [i % N_COLOURS for i in range(n_series)]
    colours = tuple(f"var(--c{number})" for number in numbers)
    style = pygal.style.Style(
        background="transparent",
        plot_background="transparent",
        foreground="var(--text)",
        foreground_strong="var(--text)",
        foreground_subtle="var(--dim)",
        guide_stroke_color="var(--line)",
        major_guide_stroke_color="var(--line)",
        guide_stroke_dasharray="none",
        major_guide_stroke_dasharray="none",
        colors=colours,
        value_colors=colours,
        font_family="system-ui, sans-serif",
        label_font_size=11,
        major_label_font_size=11,
        legend_font_size=12,
        title_font_size=12,
        stroke_width="1.5",
        opacity=".85",
    )
    given = {
        "js": [],
        "style": style,
        "width": 600,
        "height": 264 + _ROW * n_rows,
        "margin": 8,
        "margin_bottom": 16 + _ROW * (n_rows - n_series // _IN_A_ROW),  # it rounds down
        "include_x_axis": True,
        "dots_size": 2,
        "max_scale": 6,
        "truncate_legend": 40,
        "legend_at_bottom": True,
        "legend_at_bottom_columns": _IN_A_ROW,
        "legend_box_size": 10,
        "show_legend": n_series > 1,
        "value_formatter": lambda value: f"{value:,.4g}",
        "x_value_formatter": lambda value: f"{value:,.4g}",
        "title": None,
    }
    return pygal.Config(**{**given, **{key: how[key] for key in how if key != "colours"}})


def _without_scripts(chart: Any) -> str:
    """Return a chart as SVG without scripts; browsers themselves show figures under the mouse."""
    from pygal.etree import etree

    tree = chart.render_tree()
    for parent in list(tree.iter()):
        for child in list(parent):
            kind = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else ""
            if kind == "desc" and child.get("class") == "value":
                child.tag = child.tag.replace("desc", "title")
                child.attrib.clear()
            elif kind in ("script", "desc") or (kind == "title" and parent is tree):
                parent.remove(child)
    found: str = etree.tostring(tree, encoding="unicode")
    return found
