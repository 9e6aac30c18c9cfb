"""The long measurements of reliability: `make soak`, ARGS=--quick for a few seconds of each.

Each entry runs in a process of its own. Its figures are printed, and kept in FOLDER/figures.json
(`--out FOLDER`) beside those of other entries; `page.py` makes the page of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent / "benchmarks")]

import page  # noqa: E402
import results  # noqa: E402
from figures import ENTRIES, Figure, measure_of  # noqa: E402
from stalls import Stalls  # noqa: E402

from tests.leak_guard import LeakGuard  # noqa: E402

LIMIT_S = 8 * 3600.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:12} {about}" for name, about in ENTRIES.items()),
    )
    parser.add_argument("--only", default="", help="these entries, with commas between them")
    parser.add_argument("--quick", action="store_true", help="some seconds each: a look, no result")
    parser.add_argument("--out", type=Path, help="folder of the report; none is written by --quick")
    parser.add_argument("--entry", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name] or list(ENTRIES)
    for name in options.only:
        if name not in ENTRIES:
            parser.error(f"{name!r} is not one of {', '.join(ENTRIES)}")
    return options


def measure_here(entry: str, quick: bool) -> None:
    """Measure an entry in this process and print its figures as JSON, last."""
    logging.getLogger("envmgr").setLevel(logging.CRITICAL)  # failures are what is wanted here
    figures = [figure._asdict() for figure in measure_of(entry)(quick)]
    print(json.dumps(figures), flush=True)


def measure_apart(entry: str, quick: bool, guard: LeakGuard) -> list[Figure]:
    """Measure an entry in a process of its own; what it leaves behind is a figure, too."""
    before = guard.snapshot()
    command = [sys.executable, str(HERE / "run.py"), "--entry", entry]
    try:
        done = subprocess.run(
            command + ["--quick"] * quick,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        lines, failed = done.stdout.splitlines(), f"exit status {done.returncode}"
        failed = "" if done.returncode == 0 else failed
    except subprocess.TimeoutExpired:
        lines, failed = [], f"not finished after {LIMIT_S:.0f} s"
    figures = [] if failed or not lines else [Figure(**one) for one in json.loads(lines[-1])]
    if failed or not figures:
        figures.append(Figure("the measurement itself", failed or "no figures", "ends", False))
    left = [line for line in guard.wait_until_clean(before, 1.0) if "process" in line]
    if left:
        figures.append(Figure("left behind by the above", "; ".join(left), "nothing", False))
    return figures


def main() -> None:
    """Measure what was asked for; the exit status says whether all targets were met."""
    options = parse()
    if options.entry:
        measure_here(options.entry, options.quick)
        return
    guard, missed = LeakGuard(), 0
    for entry in options.only:
        print(f"==> {entry}: {ENTRIES[entry]}", flush=True)
        about, began = results.now(), time.monotonic()
        with Stalls() as stalls:
            figures = measure_apart(entry, options.quick, guard)
        about["longest_stall_s"] = round(stalls.longest_s, 3)
        for figure in figures:
            print(f"{page.verdict(figure.met):8} {figure.what}: {figure.measured}", flush=True)
            print(f"{'':8} target: {figure.target}", flush=True)
        print(f"{'':8} the machine stood still for {stalls.longest_s:.3f} s at most", flush=True)
        missed += sum(figure.met is False for figure in figures)
        if options.out is not None and not options.quick:
            _keep(options.out, entry, figures, {**about, "seconds": time.monotonic() - began})
    print(f"==> {missed} targets missed" if missed else "==> all targets met")
    sys.exit(1 if missed else 0)


def _keep(folder: Path, entry: str, figures: list[Figure], about: dict[str, Any]) -> None:
    """Write the figures of an entry beside those of others, and the page."""
    kept = results.read(folder)
    kept[entry] = {**about, "figures": [figure._asdict() for figure in figures]}
    results.write(folder, kept)
    page.write(folder)


if __name__ == "__main__":
    main()
