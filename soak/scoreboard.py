"""The faults, put to envmgr and its peers: `python soak/scoreboard.py`, or `make scoreboard`."""

from __future__ import annotations

import argparse
import datetime
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
from observe import Observer  # noqa: E402
from peers import LIBRARIES  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", default="", help=f"of {','.join(LIBRARIES)}; all by default")
    parser.add_argument("--faults", default="", help=f"of {','.join(FAULTS)}; all by default")
    parser.add_argument("--out", type=Path, help="folder of the report; without it, none")
    parser.add_argument(
        "--ding-python",
        default=machine.default_ding_python(),
        help="interpreter that has DI-engine, which needs numpy below 2",
    )
    options = parser.parse_args(arguments)
    try:
        options.libraries = _known(options.libraries, LIBRARIES)
        options.faults = _known(options.faults, FAULTS)
    except ValueError as error:
        parser.error(str(error))
    return options


def _known(text: str, known: Collection[str]) -> list[str]:
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return names or list(known)


def find_libraries(options: argparse.Namespace, board: dict[str, Any]) -> dict[str, str]:
    """Return the interpreter of each library that is installed; name the others."""
    pythons = {}
    ding_python = str(Path(shutil.which(options.ding_python) or options.ding_python).absolute())
    for library in options.libraries:
        python = ding_python if library == "ding" else sys.executable
        _, distribution = machine.PACKAGES[library]
        versions = machine.library_versions(library, python)
        if distribution in versions:
            pythons[library] = python
            board["versions"][distribution] = versions[distribution]
        else:
            reason = machine.reason_missing(library, Path(python).parent.parent)
            print(f"{library} is left out: {reason}", flush=True)
            board["missing"][library] = reason
    return pythons


def main() -> None:
    """Put each fault to each library, print the cells, and write the report."""
    options = parse()
    board: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "versions": {},
        "missing": {},
        "cells": {},
    }
    pythons = find_libraries(options, board)
    observer = Observer()
    for fault in options.faults:
        print(FAULTS[fault].title, flush=True)
        for library, python in pythons.items():
            facts = observer.observe(library, fault, python)
            cell = judge.judge(library, fault, facts)
            print(f"  {library:10} {cell.text}", flush=True)
            board["cells"].setdefault(fault, {})[library] = {**cell._asdict(), "facts": facts}
    print("\n" + page.totals_text(board))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / page.SCOREBOARD).write_text(json.dumps(board, indent=1) + "\n")
        page.write(options.out)
        print(f"written: {options.out / page.SCOREBOARD}")


if __name__ == "__main__":
    main()
