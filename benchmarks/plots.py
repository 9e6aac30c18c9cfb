"""The plots of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from cases import CASES
from results import Results
from rows import OWN, ROWS
from spec import LIFETIME
from tables import rate_text

matplotlib.use("Agg")
from matplotlib import pyplot

_OWN_COLOUR, _PEER_COLOUR = "#1f6fb4", "#b0b0b0"
_LINES = (
    "subprocess",
    "hosts2-dict",
    "hosts2-arrays",
    "gymnasium-async",
    "sb3-subproc",
    "tianshou-shmem",
    "pufferlib-1",
    "ding-subprocess",
)
_SHOWN = ("null", "cartpole", "image", "frame", "pong", "halfcheetah", "minigrid")
_COMPARED_N = 64


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what the results have figures for; return the files."""
    drawn = []
    for name, figure in (
        ("rates.png", _rates(results)),
        ("scaling.png", _scaling(results)),
        ("shares.png", _shares(results)),
        ("start.png", _start(results)),
    ):
        if figure is not None:
            figure.savefig(folder / name, dpi=110, bbox_inches="tight")
            pyplot.close(figure)
            drawn.append(folder / name)
    return drawn


def _short(row: str) -> str:
    """Return a label for a plot."""
    return ROWS[row].label.replace("`", "").replace(" (in the trainer's process)", " (in process)")


def _colour(row: str) -> str:
    return _OWN_COLOUR if ROWS[row].library == OWN else _PEER_COLOUR


def _nearest_n(results: Results, case: str) -> int:
    return min(results.env_nums(case), key=lambda n: abs(n - _COMPARED_N))


def _bars(axes: Any, bars: list[tuple[str, float]], text: Callable[[float], str]) -> None:
    bars = sorted(bars, key=lambda bar: bar[1])
    drawn = axes.barh(
        [_short(row) for row, _ in bars],
        [value for _, value in bars],
        color=[_colour(row) for row, _ in bars],
    )
    axes.bar_label(drawn, [text(value) for _, value in bars], padding=2, fontsize=7)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="x", alpha=0.3)


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    columns = min(2, count)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.5 * columns, height * lines), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.set_axis_off()
    return figure, flat[:count]


def _rates(results: Results) -> Any:
    """Bars: env steps per second of each row, for the cases without an ideal of their own."""
    cases = [c for c in _SHOWN if results.rows(c)]
    if not cases:
        return None
    figure, panels = _panels(len(cases), 4.2)
    for axes, case in zip(panels, cases, strict=True):
        n = _nearest_n(results, case)
        found = {row: results.median(case, n, row) for row in results.rows(case)}
        _bars(axes, [(row, rate) for row, rate in found.items() if rate is not None], rate_text)
        axes.set_xscale("log")
        axes.set_xlim(1e3, 2.5 * max([rate or 0.0 for rate in found.values()] + [1e3]))
        axes.set_title(f"{CASES[case].title}, n={n}", fontsize=10)
        axes.set_xlabel("env steps per second (log)", fontsize=8)
    return figure


def _scaling(results: Results) -> Any:
    """Lines: env steps per second over the number of envs."""
    cases = [c for c in ("null", "cartpole") if len(results.env_nums(c)) > 1]
    if not cases:
        return None
    figure, panels = _panels(len(cases), 4.5)
    for axes, case in zip(panels, cases, strict=True):
        for row in _LINES:
            found = {n: results.median(case, n, row) for n in results.env_nums(case)}
            points = [(n, rate) for n, rate in found.items() if rate is not None]
            if points:
                style = "-o" if ROWS[row].library == OWN else "--s"
                axes.plot(*zip(*points, strict=True), style, label=_short(row), markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(CASES[case].title, fontsize=10)
        axes.set_xlabel("envs", fontsize=8)
        axes.set_ylabel("env steps per second", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def _shares(results: Results) -> Any:
    """Bars: share of the ideal, where there is one."""
    cases = [c for c in results.cases() if CASES[c].ideal is not None]
    if not cases:
        return None
    figure, panels = _panels(len(cases), 3.2)
    for axes, case in zip(panels, cases, strict=True):
        n = _nearest_n(results, case)
        found = {row: results.share(case, n, row) for row in results.rows(case)}
        _bars(
            axes,
            [(row, 100 * share) for row, share in found.items() if share is not None],
            "{:.0f} %".format,
        )
        axes.axvline(100, color="black", linewidth=0.8)
        axes.set_title(f"{CASES[case].title.partition(':')[0]}, n={n}", fontsize=10)
        axes.set_xlabel(f"% of the ideal: {CASES[case].ideal}", fontsize=8)
    return figure


def _start(results: Results) -> Any:
    """Bars: time to the first observation, and memory, for the most envs that were started."""
    cases = [c for c in results.cases() if CASES[c].kind == LIFETIME and results.env_nums(c)]
    if not cases:
        return None
    case = cases[0]
    n = max(results.env_nums(case))
    figure, panels = _panels(2, 3.0)
    for axes, (name, label) in zip(
        panels,
        (("start_s", "seconds to the first observations"), ("pss_mb", "memory in MB (PSS)")),
        strict=True,
    ):
        found = {row: results.median(case, n, row, name) for row in results.rows(case)}
        _bars(
            axes,
            [(row, value) for row, value in found.items() if value is not None],
            "{:.3g}".format,
        )
        axes.set_title(f"CartPole, n={n}: {label}", fontsize=10)
    return figure
