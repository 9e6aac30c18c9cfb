"""Writes the report of a run: `python report.py FOLDER` writes it anew from its results.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tables
from cases import CASES
from results import Results

RESULTS = "results.json"
PAGE = "README.md"

_CAPTIONS = {
    "rates.png": "Env steps per second by library",
    "scaling.png": "Env steps per second over the number of envs",
    "shares.png": "Shares of what the machine can do",
    "start.png": "Start-up time and memory",
}


def write(results: Results, folder: Path) -> None:
    """Write the page, results.json and the plots into a folder; plots need matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(results.to_dict(), indent=1) + "\n")
    (folder / PAGE).write_text(page(results, _draw(results, folder)))


def _draw(results: Results, folder: Path) -> list[Path]:
    for name in _CAPTIONS:
        (folder / name).unlink(missing_ok=True)
    try:
        import plots
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
        return []
    return plots.draw(results, folder)


def terminal(results: Results) -> str:
    """Return the tables for the terminal."""
    parts = []
    for case in results.cases():
        parts += [CASES[case].title, tables.plain(tables.case_table(results, case))]
    if len(results.left_out) + len(results.peers_missing):
        parts += ["Left out", tables.plain(tables.left_out_table(results))]
    return "\n".join(parts)


def page(results: Results, plots: list[Path]) -> str:
    """Return the page of a run as markdown."""
    parts = [
        "# Benchmarks",
        "Written by `make bench`; a new run writes it anew. [How it is measured]"
        "(../../benchmarks/README.md), and everything raw in [results.json](results.json).",
        "Figures are env steps per second, the median of the rounds. In brackets: times "
        "Gymnasium's AsyncVectorEnv, and the share of the ideal where there is one; both are "
        "formed within each round first. Bold is the fastest row of a column.",
        _machine(results),
        "## Targets",
        tables.markdown(tables.targets_table(results)).rstrip(),
        "## What bounds it",
        "Beside rows of envmgr: processes of the same shape that do nothing but step, ring and be "
        "rung (`adapters/bare_processes.py`): no request ids, no checks, no rewards, no infos, no "
        "time limits, no deaths. What they do not reach, waking processes on this machine costs; "
        "the rest is envmgr's own. In brackets: the share of the ideal.",
        tables.markdown(tables.bounds_table(results)).rstrip(),
        "## Who is fastest",
        "`spread`: how far the rounds of envmgr's row are apart, as a share of their median.",
        tables.markdown(tables.best_table(results)).rstrip(),
    ]
    for case in results.cases():
        parts += [f"## {CASES[case].title}", *_ideal(case)]
        parts.append(tables.markdown(tables.case_table(results, case)).rstrip())
    if results.left_out or results.peers_missing:
        parts += ["## Left out", tables.markdown(tables.left_out_table(results)).rstrip()]
    if plots:
        parts.append("## Plots")
        parts += [f"![{_CAPTIONS[plot.name]}]({plot.name})" for plot in plots]
    return "\n\n".join(parts) + "\n"


def _ideal(case: str) -> list[str]:
    ideal = CASES[case].ideal
    return [f"100 %: {ideal}."] if ideal else []


def _machine(results: Results) -> str:
    machine, settings = results.machine, results.settings
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(machine.get("versions", {}).items())
    )
    return "\n".join(
        (
            "## Machine",
            "",
            f"- {machine.get('cpu')}, {machine.get('usable_cores')} cores usable, "
            f"{machine.get('ram_gib')} GiB of memory",
            f"- {machine.get('kernel')}, {machine.get('python')}",
            f"- {versions}",
            f"- {settings.get('date')}; rounds: {settings.get('rounds')}; seconds per measurement: "
            f"{settings.get('seconds')}, with envs that sleep more",
        )
    )


def main() -> None:
    """Write a report anew."""
    folder = Path(sys.argv[1])
    write(Results.from_dict(json.loads((folder / RESULTS).read_text())), folder)


if __name__ == "__main__":
    main()
