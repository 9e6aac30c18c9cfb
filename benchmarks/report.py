"""Writes the report of a run: `python report.py FOLDER` writes it anew from its results.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tables
from cases import CASES, REFERENCE
from results import Results
from rows import ROWS

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


def read(folder: Path) -> Results:
    """Return what a run has written into a folder; nothing, if none has."""
    path = folder / RESULTS
    return Results.from_dict(json.loads(path.read_text())) if path.exists() else Results()


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
        if tables.has_cpu(case):
            parts.append(tables.plain(tables.cpu_table(results, case)))
    for title, _, table in _further(results):
        parts += [title, tables.plain(table)]
    measured = tables.targets_table(results, only_measured=True)
    if measured[1:]:
        parts += ["Targets", tables.plain(measured)]
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
        "Gymnasium's AsyncVectorEnv where nothing else is said, and the share of the ideal where "
        "there is one; both are "
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
    for title, text, table in _further(results):
        parts += [f"## {title}", text, tables.markdown(table).rstrip()]
    for case in results.cases():
        parts += [f"## {CASES[case].title}", *_about(case)]
        both = [tables.case_table(results, case)]
        if tables.has_cpu(case):
            # What others take of the machine lowers rates, and hardly what a step takes of it.
            both.insert(0 if results.was_busy else 1, tables.cpu_table(results, case))
        parts += [tables.markdown(table).rstrip() for table in both]
    if results.left_out or results.peers_missing:
        parts += ["## Left out", tables.markdown(tables.left_out_table(results)).rstrip()]
    if plots:
        parts.append("## Plots")
        parts += [f"![{_CAPTIONS[plot.name]}]({plot.name})" for plot in plots]
    return "\n\n".join(parts) + "\n"


def _further(results: Results) -> Iterator[tuple[str, str, tables.Table]]:
    """Yield titles, texts and tables of what follows from several rows, where there are figures."""
    for title, text, table in (
        (
            "Above a plain loop",
            "us of CPU per env step. A plain loop steps as many envs one after another in one "
            "process, without any library; its CPU is subtracted, round by round, from that of the "
            "workers, and from that of both. `spread`: how far the rounds of a row are apart.",
            tables.above_plain_table(results),
        ),
        (
            "Ways to take a batch",
            "What the trainer's side takes above `send_arrays` and `recv_arrays`, with null envs "
            "on 2 workers: a part for each batch and one for each env in it, from two sizes.",
            tables.doors_table(results),
        ),
        (
            "Rows beside themselves",
            "The same row twice in each round: how far its two ratios are from 1 is chance.",
            tables.again_table(results),
        ),
    ):
        if table[1:]:
            yield title, text, table


def _about(case: str) -> list[str]:
    about = CASES[case]
    found = [f"100 %: {about.ideal}."] if about.ideal else []
    if about.reference != REFERENCE:
        found.append(f"In brackets: times {ROWS[about.reference].label}.")
    return found


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
            f"- seconds per measurement: {settings.get('seconds')}, more with envs that take long; "
            f"env steps of a training: {settings.get('train_steps', 0)}",
            *map(_run_text, results.runs),
        )
    )


def _run_text(run: Mapping[str, Any]) -> str:
    taken, others = run.get("taken"), "what others took of the machine was not recorded"
    if taken is not None:
        others = (
            f"other processes took {taken['others']:.0%} of the cores, other guests of the host "
            f"{taken['host']:.0%}"
        )
    return f"- {run['date']}; rounds: {run['rounds']}; {others}: {', '.join(run['cases'])}"


def main() -> None:
    """Write a report anew."""
    folder = Path(sys.argv[1])
    write(read(folder), folder)


if __name__ == "__main__":
    main()
