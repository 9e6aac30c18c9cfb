"""The page of a report: one file that needs nothing else, and has no scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envmgr.reporting.charts import lines, shares, times
from envmgr.reporting.figures import MATTERS_S, OF_IT_QUEUED, STRAGGLES
from envmgr.reporting.markup import Html, Part, escaped, folded, table, tag
from envmgr.reporting.pictures import Picture
from envmgr.texts import counted, how_often, number, short_time

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
"""Nothing is loaded, and no script runs, whatever is in the texts that envs have written."""


def page_of(figures: Mapping[str, Any], pictures: Sequence[Picture] = ()) -> str:
    """Return the page of one run.

    Args:
        figures: as `figures_of` returns them.
        pictures: videos and images that the run has recorded.
    """
    parts = [
        _head(figures),
        _notes(figures),
        _tiles(figures["summary"]),
        tag("h2", "Over time"),
        tag("div", *over_time({"": figures}), class_="charts"),
        tag("h2", "Where the time went"),
        *_time(figures),
        tag("h2", "Envs"),
        *_envs(figures),
        tag("h2", "Failures"),
        *_failures(figures["failures"]),
        *_pictures(pictures),
        *_config(figures),
    ]
    return whole(figures["run"], *parts)


def whole(title: str, *parts: Part) -> str:
    """Return a page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - envmgr"),
        tag("style", Html(Path(__file__).with_name("style.css").read_text())),
    )
    foot = tag(
        "p",
        "Written by envmgr. The charts were drawn by pygal, © Kozea, under the GNU LGPL, version 3 "
        "or later: https://www.pygal.org. The style sheet in each of them is from there.",
        class_="dim",
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", *parts, foot), lang="en") + "\n"


def _head(figures: Mapping[str, Any]) -> Html:
    about = figures["summary"]
    workers = about.get("num_workers")
    versions = ", ".join(f"{name} {v}" for name, v in about.get("versions", {}).items())
    said = [
        f"{_counted(about.get('env_num'), 'env')} of {about.get('env')} on {about.get('manager')}",
        _counted(workers, "worker"),
        f"policy {about.get('policy')}, seed {about.get('seed')}",
        f"begun {about.get('began_at')}",
        *_resumed(about.get("resumed", ())),
        versions,
    ]
    known = "; ".join(said) if about.get("manager") else ""
    return tag("header", tag("h1", figures["run"]), tag("p", known, class_="dim"))


def _counted(n: Any, noun: str) -> str:
    """Return a number of things, which a summary may not say, with their noun."""
    return counted(n, noun) if isinstance(n, int) else f"{number(n)} {noun}s"


def _resumed(resumed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how often a run was resumed, and when."""
    at = ", ".join(str(one.get("at")) for one in resumed)
    return [f"resumed {how_often(len(resumed))} ({at})"] if resumed else []


def _notes(figures: Mapping[str, Any]) -> list[Html]:
    """Return the warnings."""
    about = figures["summary"]
    notes = list(figures["unread"])
    if about["ending"] not in (None, "done"):
        notes.insert(0, f"the run {about['ending']}: {about['error']}")
    return [tag("p", note, class_="bad") for note in notes]


def _tiles(about: Mapping[str, Any]) -> Html:
    returns = about.get("return", {})
    tiles = [
        ("steps", number(about["steps"])),
        ("time", short_time(about["elapsed_s"])),
        ("steps/s", number(about.get("steps_per_s"), 0)),
        ("episodes", number(about["episodes"])),
        ("mean return", number(returns.get("mean"))),
        ("of the last 100", number(returns.get("mean_of_last_100"))),
        ("mean length", number(about.get("length", {}).get("mean"), 1)),
        ("failures", number(about["failures"])),
        *((name, number(n)) for name, n in about.get("outcomes", {}).items()),
    ]
    return tag("div", *(tag("div", tag("b", value), name) for name, value in tiles), class_="tiles")


def over_time(runs: Mapping[str, Mapping[str, Any]]) -> list[Html]:
    """Return the charts over time, of one run or of several.

    Args:
        runs: figures by name; for a single run, more is drawn, and failures are marked.
    """
    one = next(iter(runs.values())) if len(runs) == 1 else None
    failures = () if one is None else one["failures"]["elapsed_s"]
    charts = (
        ("Returns of episodes", "return", "return"),
        ("Lengths of episodes", "steps", "length"),
        ("Steps per second", "steps/s", "rate"),
        ("Memory", "MB", "memory"),
    )
    return [
        lines(title, unit, _columns(runs, what), aside=_ASIDE, failures=failures)
        for title, unit, what in charts
    ]


_ASIDE = ("10 %", "90 %")
_PARTS = {
    "return": {"mean": "return_mean", "10 %": "return_p10", "90 %": "return_p90"},
    "length": {"mean": "length_mean", "10 %": "length_p10", "90 %": "length_p90"},
    "rate": {"steps/s": "steps_per_s"},
    "memory": {
        "all workers": "workers_mb",
        "largest worker": "largest_worker_mb",
        "trainer": "trainer_mb",
    },
}
"""What is drawn, and from which columns: all of them for one run, the first for several."""


def _columns(runs: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
    parts = _PARTS[what]
    where = "episodes_over_time" if what in ("return", "length") else "samples_over_time"
    if len(runs) > 1:
        first = next(iter(parts.values()))
        return {name: _points(one[where], first) for name, one in runs.items()}
    (one,) = runs.values()
    found = {name: _points(one[where], column) for name, column in parts.items()}
    return {name: points for name, points in found.items() if any(y is not None for _, y in points)}


def _points(columns: Mapping[str, Any], name: str) -> list[tuple[float, float | None]]:
    return list(zip(columns["elapsed_s"], columns[name], strict=True))


def bar_of(parts: Mapping[str, float | None]) -> dict[str, float]:
    """Return the parts of a time that add up to it."""
    return {name: part or 0.0 for name, part in parts.items() if name != OF_IT_QUEUED}


def _time(figures: Mapping[str, Any]) -> list[Html]:
    spent: Mapping[str, Mapping[str, Any]] = figures["time"]
    if not spent:
        return [tag("p", "Nothing was recorded.", class_="dim")]
    said = (
        "The trainer: its main thread, in the policy, in envmgr (sending, receiving, accounts), "
        "queued for a core, and waiting for envs. Workers: all of them together, in the envs' "
        "code, in envmgr, and waiting for actions. Estimates from what was measured."
    )
    names = list(dict.fromkeys(name for parts in spent.values() for name in parts))
    rows = [[who, *(short_time(parts.get(name)) for name in names)] for who, parts in spent.items()]
    return [
        tag("p", said, class_="dim"),
        tag("div", shares("Shares", {who: bar_of(p) for who, p in spent.items()}), class_="charts"),
        table(["", *names], rows),
    ]


def _envs(figures: Mapping[str, Any]) -> list[Html]:
    envs = figures["envs"]
    stragglers = figures["stragglers"]
    if not any("step" in env for env in envs):
        said = "Times were not measured: `metrics: {}` in the manager's config has them measured."
    elif stragglers["envs"]:
        named = ", ".join(
            f"env {one['env_id']} ({one['times_the_median']:.1f} x)"
            for one in stragglers["envs"][:20]
        )
        said = (
            f"Stragglers: {named}. Their steps take longer than those of the env in the middle, "
            f"which take {short_time(stragglers['median_step_s'])}. Who gathers all envs waits for "
            "the slowest."
        )
    else:
        said = (
            f"No stragglers: no env's steps take {STRAGGLES} times as long as those of the env in "
            f"the middle, and {short_time(MATTERS_S)} longer."
        )
    charts = [
        times(
            f"Times of {kind}s",
            {
                part: [(env["env_id"], env[kind][part]) for env in envs if kind in env]
                for part in ("p50", "p90", "p99", "max")
            },
            x="env",
        )
        for kind in ("step", "reset")
    ]
    return [tag("p", said), tag("div", *charts, class_="charts"), _env_table(figures)]


def _env_table(figures: Mapping[str, Any]) -> Html:
    header = ["env", "steps of episodes", "episodes", "mean return", "mean length", "failures"]
    header += [f"{kind} {part}" for kind in ("step", "reset") for part in ("p50", "p99", "max")]
    rows = [
        [
            str(env["env_id"]),
            number(env["steps_of_episodes"]),
            number(env["episodes"]),
            number(env["return_mean"]),
            number(env["length_mean"], 1),
            number(env["failures"]),
            *(
                short_time(env.get(kind, {}).get(part))
                for kind in ("step", "reset")
                for part in ("p50", "p99", "max")
            ),
        ]
        for env in figures["envs"]
    ]
    left_out = figures["envs_left_out"]
    title = f"{counted(len(rows), 'env')}, the slowest first" + (
        f"; {left_out} more" if left_out else ""
    )
    return folded(title, table(header, rows))


def _failures(failures: Mapping[str, Any]) -> list[Html]:
    if not failures["count"] and not failures["shown"]:
        return [tag("p", "None.")]
    kinds = ", ".join(f"{kind} x {n}" for kind, n in failures["by_kind"].items())
    found = [tag("p", _counted(failures["count"], "failure") + (f": {kinds}" if kinds else ""))]
    for one in failures["shown"]:
        when = "" if one["elapsed_s"] is None else f"{number(one['elapsed_s'])} s: "
        first = one["text"].partition("\n")[0][:200]
        found.append(folded(f"{when}{first}", tag("pre", one["text"])))
    if failures["left_out"]:
        found.append(tag("p", f"{number(failures['left_out'])} more are not shown.", class_="dim"))
    return found


def _pictures(pictures: Sequence[Picture]) -> list[Html]:
    found = [tag("h2", "Pictures")] if pictures else []
    for one in pictures:
        shown = Html("")
        if one.data and one.kind.startswith("video/"):
            shown = Html(f'<video controls src="{escaped(one.data)}"></video>')
        elif one.data:
            shown = tag("img", src=one.data, alt=one.name)
        found.append(tag("figure", tag("figcaption", one.name), shown))
    return found


def _config(figures: Mapping[str, Any]) -> list[Html]:
    if figures["config"] is None:
        return []
    return [tag("h2", "Config"), folded("every key, as it was", tag("pre", figures["config"]))]
