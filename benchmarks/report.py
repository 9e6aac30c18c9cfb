"""Writes the report of runs; `python report.py FOLDER` rewrites it from the results there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tables
from cases import CASES, REFERENCE
from machine import when_text
from results import Results
from rows import ROWS

RESULTS = "results.json"
TARGETS = "targets.json"
"""The results of a run of `--targets`, which are never mixed with those of another run."""

PAGE = "README.md"

_CAPTIONS = {
    "rates.png": "Env steps per second by library",
    "scaling.png": "Env steps per second over the number of envs",
    "shares.png": "Shares of what the machine can do",
    "start.png": "Start-up time and memory",
}


def write(results: Results, folder: Path, name: str = RESULTS) -> None:
    """Write results into a folder under a name, and the page and the plots of all that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(results.to_dict(), indent=1) + "\n")
    rewrite(folder)


def rewrite(folder: Path) -> None:
    """Write the page and the plots of the results in a folder; plots need matplotlib."""
    results, targets = read(folder), read(folder, TARGETS)
    (folder / PAGE).write_text(page(results, _draw(results, folder), targets))


def read(folder: Path, name: str = RESULTS) -> Results:
    """Return the results that runs have written into a folder; empty ones if there are none."""
    path = folder / name
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
    for title, _, table in _further(results, results):
        parts += [title, tables.plain(table)]
    measured = tables.targets_table(results, only_measured=True)
    if measured[1:]:
        parts += ["Targets", tables.plain(measured)]
    if len(results.left_out) + len(results.peers_missing):
        parts += ["Left out", tables.plain(tables.left_out_table(results))]
    return "\n".join(parts)


def page(results: Results, plots: list[Path], targets: Results) -> str:
    """Return the page of a run as markdown.

    Args:
        results: of the run.
        plots: of its figures.
        targets: of a run of the targets alone, if there was one.
    """
    parts = [
        "# Benchmarks",
        "`make bench` writes this page, and a new run rewrites it. See [How it is measured]"
        "(../../benchmarks/README.md); all raw results are in [results.json](results.json).",
        "Figures are env steps per second: the median of the rounds. The brackets give the rate as "
        "a multiple of that of Gymnasium's AsyncVectorEnv, unless the text above a table says "
        "otherwise, and the share of the ideal where a case has one. Both are computed within "
        "each round before the median is taken. Bold marks the fastest row of a column.",
        _machine(results if results.measurements else targets),
        "## Targets",
        *_targets(results, targets),
        "## What bounds it",
        "This table compares rows of envmgr with processes of the same shape that use no library "
        "(`adapters/bare_processes.py`). These do nothing but step, ring doorbells and be woken by "
        "them: no request ids, no checks, no rewards, no infos, no time limits, no handling of "
        "deaths. The performance that even they do not reach is the cost of waking processes on "
        "this machine; what envmgr loses beyond that is its own cost. The brackets give the share "
        "of the ideal.",
        tables.markdown(tables.bounds_table(results)).rstrip(),
        "## Who is fastest",
        "`spread` is the difference between the highest and the lowest round of envmgr's row, as a "
        "share of the rounds' median.",
        tables.markdown(tables.best_table(results)).rstrip(),
    ]
    beside = targets if targets.measurements else results
    for title, text, table in _further(results, beside):
        parts += [f"## {title}", text, tables.markdown(table).rstrip()]
    for case in results.cases():
        parts += [f"## {CASES[case].title}", *_about(case)]
        both = [tables.case_table(results, case)]
        if tables.has_cpu(case):
            # Load from others lowers the rates, but hardly changes the CPU that a step takes.
            both.insert(0 if results.was_busy else 1, tables.cpu_table(results, case))
        parts += [tables.markdown(table).rstrip() for table in both]
    if results.left_out or results.peers_missing:
        parts += ["## Left out", tables.markdown(tables.left_out_table(results)).rstrip()]
    if plots:
        parts.append("## Plots")
        parts += [f"![{_CAPTIONS[plot.name]}]({plot.name})" for plot in plots]
    return "\n\n".join(parts) + "\n"


def _targets(results: Results, targets: Results) -> list[str]:
    if not targets.measurements:
        return [tables.markdown(tables.targets_table(results)).rstrip()]
    return [
        "These were measured in a run of their own, `make bench ARGS=--targets`, the results of "
        "which are in [targets.json](targets.json). The last row is of the run above.",
        "\n".join((*_hardware(targets), *map(_run_text, targets.runs))),
        tables.markdown(tables.targets_table(targets, of_all=results)).rstrip(),
    ]


def _further(results: Results, beside: Results) -> Iterator[tuple[str, str, tables.Table]]:
    """Yield title, text and table of each comparison of several rows that has figures.

    Args:
        results: of the run.
        beside: those of the targets, which have what is reported beside them.
    """
    for title, text, table in (
        (
            "Above a plain loop",
            "Figures are us of CPU per env step. A plain loop steps the same number of envs one "
            "after another in one process, without any library. Its CPU is subtracted, round by "
            "round, from that of the workers, and from that of trainer and workers together. "
            "`spread` is the difference between the highest and the lowest round of a row.",
            tables.above_plain_table(results),
        ),
        (
            "Ways to take a batch",
            "This table shows how much more CPU the trainer's side takes than with `send_arrays` "
            "and `recv_arrays`, with null envs on 2 workers, measured with the targets. The "
            "difference is split into a part for each batch and a part for each env in it, "
            "computed from batches of two sizes.",
            tables.doors_table(beside),
        ),
        (
            "Rows beside themselves",
            "The same row is measured twice in each round, with the targets. How far its two "
            "ratios are from 1 is due to chance.",
            tables.again_table(beside),
        ),
    ):
        if table[1:]:
            yield title, text, table


def _about(case: str) -> list[str]:
    about = CASES[case]
    found = [f"The ideal (100 %): {about.ideal}."] if about.ideal else []
    if about.reference != REFERENCE:
        found.append(f"In brackets: a multiple of the rate of {ROWS[about.reference].label}.")
    return found


def _machine(results: Results) -> str:
    versions_of, settings = results.machine.get("versions", {}), results.settings
    versions = ", ".join(f"{name} {version}" for name, version in sorted(versions_of.items()))
    return "\n".join(
        (
            "## Machine",
            "",
            *_hardware(results),
            f"- {versions}",
            f"- seconds per measurement: {settings.get('seconds')}, more with slow envs; "
            f"env steps per training run: {settings.get('train_steps', 0)}",
            *map(_run_text, results.runs),
        )
    )


def _hardware(results: Results) -> tuple[str, str]:
    machine = results.machine
    return (
        f"- {machine.get('cpu')}, {machine.get('usable_cores')} cores usable, "
        f"{machine.get('ram_gib')} GiB of memory",
        f"- {machine.get('kernel')}, {machine.get('python')}",
    )


def _run_text(run: Mapping[str, Any]) -> str:
    taken, others = run.get("taken"), "how much of the machine others took was not recorded"
    if taken is not None:
        others = (
            f"other processes took {taken['others']:.0%} of the cores, other guests of the host "
            f"{taken['host']:.0%}"
        )
    return f"- {when_text(run)}; rounds: {run['rounds']}; {others}: {', '.join(run['cases'])}"


def main() -> None:
    """Rewrite the report in the folder that the command line names."""
    rewrite(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
