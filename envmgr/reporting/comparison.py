"""Compares several runs on one page."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.reporting.charts import shares
from envmgr.reporting.figures import FORMAT
from envmgr.reporting.markup import Html, folded, table, tag
from envmgr.reporting.page import bar_of, over_time, whole
from envmgr.texts import number, short_time

_MOST_LINES = 2000


def comparison_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of several runs together, each with a name of its own."""
    named: dict[str, Any] = {}
    for figures in runs:
        name, nth = figures["run"], 2
        while name in named:
            name, nth = f"{figures['run']} ({nth})", nth + 1
        named[name] = figures
    return {"envmgr_report": FORMAT, "runs": named}


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """Return the page that compares runs.

    Args:
        comparison: as `comparison_of` returns it.
    """
    runs: Mapping[str, Mapping[str, Any]] = comparison["runs"]
    unread = [f"{name}: {note}" for name, one in runs.items() for note in one["unread"]]
    return whole(
        "Comparison of " + ", ".join(runs),
        tag("h1", f"{len(runs)} runs"),
        [tag("p", note, class_="bad") for note in unread],
        _table(runs),
        tag("h2", "Over time"),
        tag("div", *over_time(runs), class_="charts"),
        tag("h2", "Where the time went"),
        tag("div", *_shares(runs), class_="charts"),
        tag("h2", "Configs"),
        *_differences(runs),
    )


def _table(runs: Mapping[str, Mapping[str, Any]]) -> Html:
    header = ["run", "ending", "steps", "time", "steps/s", "episodes", "mean return"]
    header += ["mean length", "failures", "stragglers", "step p50", "step p99", "all workers, MB"]
    return table(header, [[name, *_cells(one)] for name, one in runs.items()])


def _cells(one: Mapping[str, Any]) -> list[str]:
    about = one["summary"]
    return [
        about["ending"] or "-",
        number(about["steps"]),
        short_time(about["elapsed_s"]),
        number(about.get("steps_per_s"), 0),
        number(about["episodes"]),
        number(about.get("return", {}).get("mean")),
        number(about.get("length", {}).get("mean"), 1),
        number(one["failures"]["count"]),
        number(len(one["stragglers"]["envs"])),
        short_time(_slowest(one, "p50")),
        short_time(_slowest(one, "p99")),
        number(one["memory"]["workers_mb"], 0),
    ]


def _slowest(one: Mapping[str, Any], part: str) -> float | None:
    """Return the longest of the envs' step times of one kind, such as `p50`."""
    found = [env.get("step", {}).get(part) for env in one["envs"]]
    return max((value for value in found if value is not None), default=None)


def _shares(runs: Mapping[str, Mapping[str, Any]]) -> list[Html]:
    """Return a chart for trainers and one for workers, with a bar for each run."""
    return [
        shares(
            f"{who.capitalize()}, shares of the time",
            {name: bar_of(one["time"][who]) for name, one in runs.items() if who in one["time"]},
        )
        for who in ("trainer", "workers")
    ]


def _differences(runs: Mapping[str, Mapping[str, Any]]) -> list[Html]:
    """Return how the configs differ from that of the first run."""
    (first, begun), *others = ((name, _lines(one)) for name, one in runs.items())
    found = []
    for name, config in others:
        differs = difflib.unified_diff(begun, config, first, name, n=0, lineterm="")
        text = "\n".join(line for line in differs if not line.startswith("@@"))
        found.append(folded(f"{name}, compared with {first}", tag("pre", text or "the same")))
    return found


def _lines(one: Mapping[str, Any]) -> list[str]:
    """Return the lines of a config, without the comments, which differ each time."""
    lines = (one["config"] or "").splitlines()[:_MOST_LINES]
    return [line for line in lines if not line.startswith("#")]
