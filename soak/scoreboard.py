"""The faults, put to envmgr and its peers: `python soak/scoreboard.py`, or `make scoreboard`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "benchmarks"))

import judge  # noqa: E402
import machine  # noqa: E402
import page  # noqa: E402
from faults import FAULTS  # noqa: E402
from install import ALONE  # noqa: E402
from observe import Observer  # noqa: E402
from peers import LIBRARIES, offers  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", default="", help=f"of {','.join(LIBRARIES)}; all by default")
    parser.add_argument("--faults", default="", help=f"of {','.join(FAULTS)}; all by default")
    parser.add_argument("--out", type=Path, help="folder of the report; without it, none")
    parser.add_argument("--judge", action="store_true", help="only judge anew what was seen")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="LIBRARY=PATH",
        help="interpreter that has a library; by default this one, and that of the environment "
        f"beside it for those that need one of their own: {', '.join(ALONE)}",
    )
    options = parser.parse_args(arguments)
    try:
        options.libraries = _known(options.libraries, LIBRARIES)
        options.faults = _known(options.faults, FAULTS)
        options.python = _pythons(options.python)
    except ValueError as error:
        parser.error(str(error))
    return options


def _known(text: str, known: Collection[str]) -> list[str]:
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return names or list(known)


def _pythons(texts: Sequence[str]) -> dict[str, str]:
    """Return the interpreters of all libraries, of which some are given as LIBRARY=PATH."""
    pythons = {library: machine.default_python(library) for library in LIBRARIES}
    for text in texts:
        library, _, path = text.partition("=")
        if library not in LIBRARIES or not path:
            raise ValueError(f"{text!r} is not LIBRARY=PATH, with one of {', '.join(LIBRARIES)}")
        pythons[library] = path
    # Probes run in folders of their own: the path must hold there.
    return {
        library: str(Path(shutil.which(path) or path).absolute())
        for library, path in pythons.items()
    }


def find_libraries(options: argparse.Namespace, board: dict[str, Any]) -> dict[str, str]:
    """Return the interpreter of each library that is installed; name the others."""
    pythons = {}
    for library in options.libraries:
        python = options.python[library]
        _, distribution = machine.PACKAGES[library]
        versions = machine.library_versions(library, python)
        if distribution in versions:
            pythons[library] = python
            board["versions"][distribution] = versions[distribution]
            board["missing"].pop(library, None)
        else:
            reason = machine.reason_missing(library, Path(python).parent.parent)
            print(f"{library} is left out: {reason}", flush=True)
            board["missing"][library] = reason
    return pythons


def main() -> None:
    """Put each fault to each library, print the cells, and write the report.

    A run of some faults or some libraries keeps the cells of the others.
    """
    options = parse()
    board = kept(options.out)
    if options.judge:
        for fault, row in board["cells"].items():
            for library, cell in row.items():
                row[library] = cell_of(library, fault, cell.get("facts"))
    else:
        board.update(machine.when(), machine=machine.describe())
        observe_all(options, board)
    print("\n" + page.totals_text(board))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / page.SCOREBOARD).write_text(json.dumps(board, indent=1) + "\n")
        page.write(options.out)
        print(f"written: {options.out / page.SCOREBOARD}")


def kept(folder: Path | None) -> dict[str, Any]:
    """Return the scoreboard in a folder, or an empty one."""
    if folder is not None and (folder / page.SCOREBOARD).exists():
        return dict(json.loads((folder / page.SCOREBOARD).read_text()))
    return {"versions": {}, "missing": {}, "cells": {}}


def observe_all(options: argparse.Namespace, board: dict[str, Any]) -> None:
    """Fill in the cells that were asked for."""
    pythons = find_libraries(options, board)
    observer = Observer()
    for fault in options.faults:
        print(FAULTS[fault].title, flush=True)
        for library, python in pythons.items():
            offered = offers(library, FAULTS[fault].users)
            facts = observer.observe(library, fault, python) if offered else None
            cell = cell_of(library, fault, facts)
            print(f"  {library:10} {cell['text']}", flush=True)
            board["cells"].setdefault(fault, {})[library] = cell
    board["cells"] = {fault: board["cells"][fault] for fault in FAULTS if fault in board["cells"]}


def cell_of(library: str, fault: str, facts: dict[str, Any] | None) -> dict[str, Any]:
    """Return a cell, with what was seen; a library that does not offer the thing has no facts."""
    if facts is None:
        return judge.NOT_OFFERED._asdict()
    return {**judge.judge(library, fault, facts)._asdict(), "facts": facts}


if __name__ == "__main__":
    main()
