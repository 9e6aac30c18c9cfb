"""Writes the page of results: `python page.py docs/reliability` writes docs/reliability.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from faults import FAULTS
from figures import ENTRIES
from judge import CHECKS
from machine import when_text
from peers import LIMIT_S, TITLES, TITLES_WITH_USERS

FIGURES = "figures.json"
MUTANTS = "mutants.json"
SCOREBOARD = "scoreboard.json"


def write(folder: Path) -> None:
    """Write the page beside `folder`, from the results that `folder` holds."""
    parts = [
        "<!-- Written by soak/page.py from the results in docs/reliability: do not edit it. -->",
        "# Reliability",
        "This page shows what was measured under faults. [How it is measured](../soak/README.md); "
        "[what counts as a failure, and what follows](guide/failures.md).",
    ]
    written = {FIGURES: figures_part, MUTANTS: mutants_part, SCOREBOARD: scoreboard_part}
    for name, part in written.items():
        if (folder / name).exists():
            parts.append(part(json.loads((folder / name).read_text())))
    (folder.parent / f"{folder.name}.md").write_text("\n\n".join(parts) + "\n")


# -- figures --------------------------------------------------------------------------------------


def verdict(met: bool | None) -> str:
    """Return one word that says whether a target was met."""
    return {True: "met", False: "MISSED", None: "-"}[met]


def figures_part(results: dict[str, Any]) -> str:
    """Return the part of the page that has the figures of `make soak`."""
    parts = [
        "## Figures",
        "Written by `make soak`, which measures each part in a process of its own; all figures "
        f"are in [{FIGURES}](reliability/{FIGURES}) too.",
    ]
    machines = list(dict.fromkeys(machine_text(one["machine"]) for one in results.values()))
    if len(machines) == 1:
        parts.append(f"{machines[0]}.")
    for entry, about in ENTRIES.items():
        if entry in results:
            parts += _entry_parts(entry, about, results[entry], names_machine=len(machines) > 1)
    return "\n\n".join(parts)


def _entry_parts(
    entry: str, about: str, result: dict[str, Any], *, names_machine: bool
) -> list[str]:
    where = f" {machine_text(result['machine'])}." if names_machine else ""
    rows = [["what", "measured", "target", ""]]
    rows += [
        [one["what"], one["measured"], one["target"], verdict(one["met"])]
        for one in result["figures"]
    ]
    return [
        f"### {about[0].upper()}{about[1:]}",
        f"`make soak ARGS='--only {entry}'`, {when_text(result)}, {result['seconds']:.0f} s. Load "
        f"average before the run: {result['load_before']}; the machine stood still for "
        f"{result['longest_stall_s']:.3f} s at most.{where}",
        table(rows),
    ]


def machine_text(machine: dict[str, Any]) -> str:
    """Return one line that describes a machine."""
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores usable, {machine['ram_gib']} GiB, "
        f"{machine['kernel']}, {machine['python']}"
    )


# -- mutants --------------------------------------------------------------------------------------


def mutants_part(results: dict[str, Any]) -> str:
    """Return the part of the page that says what share of mutants the tests kill."""
    suites = list(dict.fromkeys(suite for one in results.values() for suite in one["killed"]))
    rows = [["code", "mutants", *(f"killed by {suite} tests" for suite in suites), "survived"]]
    for name, one in results.items():
        killed = one["killed"]
        left = one["drawn"] - sum(killed.values())
        counts = [*(killed.get(suite) for suite in suites), left]
        shares = [
            "-" if count is None else f"{count} ({count / one['drawn']:.1%})" for count in counts
        ]
        if one.get("unmet"):
            shares[-1] += f", {one['unmet']} of them on lines that none of the tests runs"
        drawn = f"{one['drawn']} of {one['of']}, seed {one['seed']}, {one['date']}"
        rows.append([f"{name}: {', '.join(one['paths'])}", drawn, *shares])
    return "\n\n".join(
        [
            "## Mutants",
            "Written by `soak/mutants.py --out docs/reliability/mutants.json --name NAME`, which "
            "measures how many defects the tests find. Each suite runs on the mutants that the "
            "suites before it have left (- marks a suite that was not run); the survivors are in "
            f"[{MUTANTS}](reliability/{MUTANTS}). [How they are drawn and run]"
            "(../soak/README.md#mutants).",
            table(rows),
        ]
    )


# -- scoreboard -----------------------------------------------------------------------------------


def scoreboard_part(board: dict[str, Any]) -> str:
    """Return the part of the page that has the scoreboard."""
    rows = shared_rows(board)
    versions = ", ".join(f"{name} {version}" for name, version in board["versions"].items())
    parts = [
        "## Scoreboard",
        "Written by `make scoreboard`, which tries the same faults on envmgr and on other "
        f"libraries: {len(rows)} faults, each in a run of its own with three envs, of which one "
        "has the fault, once. A separate process watches the run and notes what it sees; all "
        f"its notes are in [{SCOREBOARD}](reliability/{SCOREBOARD}). "
        "[What the words mean, and how each library is used](../soak/README.md#the-scoreboard).",
        f"{versions}; {when_text(board)}. {machine_text(board['machine'])}. Time limits, where a "
        f"library has them: {LIMIT_S:g} s.",
        table(totals(board)),
        _cells(rows, {library: TITLES[library] for library in libraries_of(board)}),
        *_parts_with_users(board),
    ]
    if board["missing"]:
        left_out = "; ".join(f"{TITLES[lib]}: {why}" for lib, why in board["missing"].items())
        parts.append(f"Left out: {left_out}.")
    return "\n\n".join(parts)


def shared_rows(board: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the faults that all libraries get: those where one caller steps all envs.

    The other faults need envs with a user each.
    """
    return {fault: row for fault, row in board["cells"].items() if row and not FAULTS[fault].users}


def _parts_with_users(board: dict[str, Any]) -> list[str]:
    """Return the parts about envs with a user each; empty if the board has no such rows."""
    rows = {fault: row for fault, row in board["cells"].items() if row and FAULTS[fault].users}
    if not rows:
        return []
    asked = [library for library in TITLES if any(library in row for row in rows.values())]
    offering = {lib: TITLES_WITH_USERS[lib] for lib in asked if lib in TITLES_WITH_USERS}
    others = ", ".join(TITLES[library] for library in asked if library not in offering)
    text = (
        "The next table shows the same for envs that have a user each: a thread or a coroutine, "
        "which steps its env without waiting for the others. envmgr offers that as "
        "[leases](guide/leases.md)"
    )
    text += f"; it is not offered by {others}." if others else "."
    return [f"{text} [How it is done](../soak/README.md#envs-with-users).", _cells(rows, offering)]


def _cells(rows: Mapping[str, Any], libraries: Mapping[str, str]) -> str:
    """Return a table of cells; `libraries` maps each library to its title."""
    return table(
        [
            ["the env ...", *libraries.values()],
            *(
                [FAULTS[fault].title, *(row.get(lib, {}).get("text", "") for lib in libraries)]
                for fault, row in rows.items()
            ),
        ]
    )


def totals(board: dict[str, Any]) -> list[list[str]]:
    """Return, for each check and library, in how many of the shared faults the check held."""
    libraries = libraries_of(board)
    rows = [["", *(TITLES[library] for library in libraries)]]
    for check, title in CHECKS.items():
        row = [title]
        for library in libraries:
            answers = [
                cells[library]["checks"][check]
                for cells in shared_rows(board).values()
                if library in cells and cells[library]["checks"][check] is not None
            ]
            row.append(f"{sum(answers)} of {len(answers)}")
        rows.append(row)
    return rows


def totals_text(board: dict[str, Any]) -> str:
    """Return the totals of the scoreboard for the terminal."""
    rows = totals(board)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def libraries_of(board: dict[str, Any]) -> list[str]:
    """Return the libraries that have cells of shared faults, in the order of TITLES."""
    present = {library for cells in shared_rows(board).values() for library in cells}
    return [library for library in TITLES if library in present]


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a Markdown table; the first row is its header."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
