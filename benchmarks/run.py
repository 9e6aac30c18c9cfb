"""Side-by-side benchmarks: envmgr and its peers, in alternation within one run."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import machine
import report
import targets
from cases import CASES, GROUPS, Item, plan
from envs import busy_loops
from execute import take
from ideals import SLEEP_IDEALS
from results import CPU_US, STEPS_PER_S, Results
from rows import BARE, IDEAL, LIBRARIES, OWN, ROWS
from spec import TRAINING, Spec
from tables import rate_text

WARM_UP_SHARE = 0.3
SECONDS, QUICK_SECONDS = 0.5, 0.2
ROUNDS, QUICK_ROUNDS = 3, 1
TRAIN_STEPS, QUICK_STEPS = 50_000, 2_048


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, with every default filled in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "case",
        nargs="*",
        help=f"of {', '.join(CASES)}, or of the groups {', '.join(GROUPS)}; all if none is named",
    )
    parser.add_argument("--cases", default="", help="the same as a list: null,cartpole")
    parser.add_argument("--libraries", default="", help=f"of {','.join(LIBRARIES)}; all by default")
    parser.add_argument("--rows", default="", help="only these rows: base,hosts2-arrays")
    parser.add_argument(
        "--targets",
        action="store_true",
        help="only what the targets need, and what stands beside: a report of its own",
    )
    parser.add_argument("--n", default="", help="only these numbers of envs: 8,64")
    parser.add_argument("--rounds", type=int, help="passes through everything")
    parser.add_argument("--seconds", type=float, help="length of a measurement")
    parser.add_argument("--train-steps", type=int, help="env steps of a training")
    parser.add_argument("--quick", action="store_true", help="fewer numbers of envs, one round")
    parser.add_argument("--out", type=Path, help="folder for the report; without it, none")
    parser.add_argument(
        "--add",
        action="store_true",
        help="to what the folder has of other cases: a whole run in parts",
    )
    parser.add_argument(
        "--ding-python",
        default=machine.default_python("ding"),
        help="interpreter that has DI-engine, which needs numpy below 2",
    )
    options = parser.parse_args(arguments)
    if options.add and options.out is None:
        parser.error("--add needs --out, the folder of what is added to")
    if options.add and (options.targets or options.rows or options.n or options.libraries):
        parser.error(
            "--add takes whole cases: what is compared has to be of one run, so that --targets, "
            "--rows, --n and --libraries cannot be added to another one"
        )
    try:
        named = _known([*options.case, *_split(options.cases)], [*CASES, *GROUPS])
        options.cases = _cases_of(named) or list(CASES)
        options.rows = _known(_split(options.rows), ROWS) or list(ROWS)
        options.libraries = _known(_split(options.libraries), LIBRARIES) or list(LIBRARIES)
        options.n = [int(n) for n in _split(options.n)]
    except ValueError as error:
        parser.error(str(error))
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.train_steps = options.train_steps or (QUICK_STEPS if options.quick else TRAIN_STEPS)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    return options


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _known(names: Sequence[str], known: Collection[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _cases_of(named: Sequence[str]) -> list[str]:
    """Return cases for names of cases and of groups."""
    return list(dict.fromkeys(case for name in named for case in GROUPS.get(name, (name,))))


def pythons(options: argparse.Namespace, results: Results) -> dict[str, str]:
    """Return the interpreter of each library that is installed; note the others in `results`."""
    found = {IDEAL: sys.executable, BARE: sys.executable}
    # Measuring processes run in folders of their own: the path must hold there.
    ding_python = str(Path(shutil.which(options.ding_python) or options.ding_python).absolute())
    versions: dict[str, str] = {}
    for library, (_, distribution) in machine.PACKAGES.items():
        if library not in options.libraries:
            continue
        python = ding_python if library == "ding" else sys.executable
        there = machine.library_versions(library, python)
        if distribution not in there:
            environment = Path(python).parent.parent
            results.peers_missing[library] = machine.reason_missing(library, environment)
            print(f"{library}: {results.peers_missing[library]}", flush=True)
            continue
        found[library] = python
        versions[distribution] = there[distribution]
        versions["numpy for DI-engine" if library == "ding" else "numpy"] = there["numpy"]
    versions = {**results.machine.get("versions", {}), **versions}  # of what was there, too
    results.machine = {**machine.describe(), "versions": versions}
    return found


def measure_all(options: argparse.Namespace, results: Results) -> None:
    """Measure everything, round by round; what cannot be measured is not tried again."""
    available = pythons(options, results)
    libraries = [*(lib for lib in options.libraries if lib in available), IDEAL]
    if OWN in libraries:
        libraries.append(BARE)
    items = plan(options.cases, options.n or None, libraries, options.quick, options.rows)
    if options.targets:
        wanted = frozenset(targets.items())
        items = [item for item in items if item in wanted]
    results.drop({item.case for item in items})
    loops = busy_loops()
    run: dict[str, Any] = {**machine.when()}
    run["cases"] = list(dict.fromkeys(item.case for item in items))
    results.settings.update(
        seconds=options.seconds, train_steps=options.train_steps, busy_loops=loops
    )
    results.runs.append(run)
    for case in dict.fromkeys(item.case for item in items):
        if case in SLEEP_IDEALS:
            results.sleep_ideals[case] = SLEEP_IDEALS[case]()
    print(f"{len(items)} measurements in each of {options.rounds} rounds", flush=True)
    began, watch = time.monotonic(), machine.Watch()
    for round_ in range(1, options.rounds + 1):
        run["rounds"] = f"{round_ - 1} and a part of another"  # if it is interrupted
        # What changes with time comes to those first and to those last alike.
        for number, item in enumerate(items if round_ % 2 else reversed(items), 1):
            most_rounds = CASES[item.case].most_rounds
            if (most_rounds is not None and round_ > most_rounds) or results.is_left_out(item):
                continue
            spec = _spec(item, options, loops)
            outcome = _take(item, round_, spec, available[spec.library], results)
            minutes = (time.monotonic() - began) / 60
            print(
                f"{minutes:5.1f} min  round {round_}  {number:3}/{len(items)}  {item.case:10} "
                f"n={item.env_num:<3}  {ROWS[item.row].label}: {outcome}",
                flush=True,
            )
            run["taken"] = watch.taken()
    run["rounds"] = options.rounds


def _spec(item: Item, options: argparse.Namespace, loops: int) -> Spec:
    case, row = CASES[item.case], ROWS[item.row]
    length_s = options.seconds * case.stretch
    return Spec(
        library=row.library,
        options=row.options,
        env=case.env,
        env_num=item.env_num,
        kind=case.kind,
        seconds=length_s,
        warm_up_s=length_s * WARM_UP_SHARE,
        busy_loops=loops,
        trainer=case.trainer,
        train_steps=options.train_steps if case.kind == TRAINING else 0,
    )


def _take(item: Item, round_: int, spec: Spec, python: str, results: Results) -> str:
    figures = take(spec, python)
    for problem in ("unavailable", "error"):
        if problem in figures:
            results.leave_out(item, figures[problem])
            return f"left out: {figures[problem]}"
    results.add(item, round_, figures)
    if STEPS_PER_S in figures:
        cpu = " + ".join(f"{figures[name]:.1f}" for name in CPU_US)
        return f"{rate_text(figures[STEPS_PER_S])} steps/s, {cpu} us of CPU"
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


def main() -> None:
    """Run the benchmarks; Ctrl-C ends them and keeps what was measured."""
    options = parse()
    results = Results()
    if options.add:
        results = report.read(options.out)
    try:
        measure_all(options, results)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured", flush=True)
    print("\n" + report.terminal(results))
    if options.out is not None and results.measurements:
        report.write(results, options.out, report.TARGETS if options.targets else report.RESULTS)
        print(f"written: {options.out}")


if __name__ == "__main__":
    main()
