"""The tables of a report, as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from cases import BELOW_DOORS, CASES, DOORS, DOORS_N, SLEEP
from results import CPU_US, STEPS_PER_S, Results, median_above, own_rows, peer_rows
from rows import IDEAL, ROWS
from spec import LIFETIME, TRAINING
from targets import COUNT, TARGETS, TIMES

Table = list[list[str]]
NOTHING = "-"
_PLAIN = "plain-all"

_LIFETIME_FIGURES = (
    ("start_s", "start", "{:.2f} s"),
    ("pss_mb", "memory", "{:.0f} MB"),
    ("close_s", "close", "{:.2f} s"),
)


def rate_text(rate: float) -> str:
    """Return env steps per second with three digits: `32.3 k`."""
    for size, unit in ((1e6, " M"), (1e3, " k"), (1.0, "")):
        if rate >= 0.9995 * size:
            scaled = rate / size
            digits = max(0, 3 - len(f"{scaled:.0f}"))
            return f"{scaled:.{digits}f}{unit}"
    return f"{rate:.2f}"


def case_table(results: Results, case: str) -> Table:
    """Return the table of one case: a line per row, a column per number of envs."""
    if CASES[case].kind == LIFETIME:
        return _lifetime_table(results, case)
    rows, env_nums = results.rows(case), results.env_nums(case)
    contestants = [*own_rows(rows), *peer_rows(rows)]
    best = {n: results.fastest(case, n, contestants) for n in env_nums}
    is_training = CASES[case].kind == TRAINING
    what = "env steps per second" + (", learning included" if is_training else "")
    table = [[what, *(f"n={n}" for n in env_nums)]]
    for row in rows:
        cells = [_rate_cell(results, case, n, row, row == best[n]) for n in env_nums]
        table.append([ROWS[row].label, *cells])
    for row in CASES[case].ideal_rows:
        rate = results.median(case, 1, row)
        if rate is not None:
            table.append([ROWS[row].label, *([rate_text(rate)] * len(env_nums))])
    return table


def _rate_cell(results: Results, case: str, env_num: int, row: str, best: bool) -> str:
    rate = results.median(case, env_num, row)
    if rate is None:
        return NOTHING
    remarks = []
    reference = CASES[case].reference
    ratio = results.ratio(case, env_num, row, reference)
    if ratio is not None and row != reference:
        remarks.append(f"{ratio:.3g} x")
    share = results.share(case, env_num, row)
    if share is not None:
        remarks.append(f"{100 * share:.1f} %")
    text = f"**{rate_text(rate)}**" if best else rate_text(rate)
    return f"{text} ({', '.join(remarks)})" if remarks else text


def _lifetime_table(results: Results, case: str) -> Table:
    env_nums = results.env_nums(case)
    heads = [f"{name}, n={n}" for n in env_nums for _, name, _ in _LIFETIME_FIGURES]
    table = [["", *heads]]
    for row in results.rows(case):
        line = [ROWS[row].label]
        for n in env_nums:
            for figure, _, form in _LIFETIME_FIGURES:
                value = results.median(case, n, row, figure)
                line.append(NOTHING if value is None else form.format(value))
        table.append(line)
    return table


def has_cpu(case: str) -> bool:
    """Return whether the CPU of a step is meaningful: for envs that only sleep, it is not."""
    return CASES[case].kind != LIFETIME and CASES[case].ideal != SLEEP


def cpu_table(results: Results, case: str) -> Table:
    """Return us of CPU per env step, a line per row; for trainings, also the share of envs."""
    rows, env_nums = results.rows(case), results.env_nums(case)
    table = [["us of CPU per env step: trainer + workers", *(f"n={n}" for n in env_nums)]]
    table += [
        [ROWS[row].label, *(_cpu_cell(results, case, n, row) for n in env_nums)] for row in rows
    ]
    return table


def _cpu_cell(results: Results, case: str, env_num: int, row: str) -> str:
    text = _cpu_text(results, case, env_num, row)
    share = results.median(case, env_num, row, "envs_share")
    return text if share is None else f"{text} ({100 * share:.0f} % of the time in envs)"


def above_plain_table(results: Results) -> Table:
    """Return the us of CPU per env step that rows take above a plain loop over the same envs."""
    table = [
        ["case", "n", "row", "trainer", "workers above the loop", "both above the loop", "spread"],
    ]
    for case in results.cases():
        for row in results.rows(case):
            for n in results.env_nums(case):
                above = results.cpu_above(case, n, row, _PLAIN)
                trainer = results.median(case, n, row, CPU_US[0])
                if above is None or trainer is None or _is_no_rival(row):
                    continue
                values = results.cpu_by_round(case, n, row).values()
                workers = results.workers_above(case, n, row, _PLAIN)
                has_workers = bool(results.median(case, n, row, CPU_US[1]))
                table.append(
                    [
                        case,
                        str(n),
                        ROWS[row].label,
                        f"{trainer:.1f}",
                        f"{workers:.1f}" if has_workers and workers is not None else NOTHING,
                        f"{above:.1f}",
                        f"{max(values) - min(values):.1f}",
                    ]
                )
    return table


def _is_no_rival(row: str) -> bool:
    return ROWS[row].library == IDEAL or ROWS[row].is_native


def doors_table(results: Results) -> Table:
    """Return the CPU that other calls cost the trainer above `recv_arrays`, from two sizes."""
    few, many = DOORS_N
    table = [["null envs, 2 workers", "us of the trainer's CPU per batch", "plus us per env in it"]]
    for row in DOORS:
        above = [_trainer_above(results, n, row) for n in DOORS_N]
        if above[0] is None or above[1] is None:
            continue
        per_env = (many * above[1] - few * above[0]) / (many - few)
        per_batch = few * above[0] - few * per_env
        table.append(
            [ROWS[row].label.removeprefix("envmgr, "), f"{per_batch:.1f}", f"{per_env:.2f}"]
        )
    return table


def _trainer_above(results: Results, env_num: int, row: str) -> float | None:
    ours, below = (results.by_round("null", env_num, key, CPU_US[0]) for key in (row, BELOW_DOORS))
    return median_above(ours, below)


def again_table(results: Results) -> Table:
    """Return how far apart two measurements of one row are: what chance does to a ratio."""
    table = [["case", "n", "row", "rate over itself", "CPU over itself", "CPU ratios of rounds"]]
    for case, n, row in results.again():
        first = ROWS[row].again
        rate = first and results.ratio(case, n, row, first)
        cpu = first and results.cpu_ratio(case, n, row, first)
        if not first or not rate or not cpu:
            continue
        ours, theirs = (results.cpu_by_round(case, n, key) for key in (row, first))
        ratios = [ours[round_] / theirs[round_] for round_ in ours if round_ in theirs]
        table.append(
            [
                case,
                str(n),
                ROWS[first].label,
                f"{rate:.2f} x",
                f"{cpu:.2f} x",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    return table


def best_table(results: Results) -> Table:
    """Return who is fastest: a line for each case and number of envs."""
    table = [["case", "n", "envmgr's fastest", "a peer's fastest", "ratio", "spread", "best"]]
    for case in results.cases():
        if CASES[case].kind == LIFETIME:
            continue
        rows = results.rows(case)
        table += [_best_line(results, case, n, rows) for n in results.env_nums(case)]
    return table


def _best_line(results: Results, case: str, env_num: int, rows: Sequence[str]) -> list[str]:
    own = results.fastest(case, env_num, own_rows(rows))
    peer = results.fastest(case, env_num, peer_rows(rows))
    best = results.fastest(case, env_num, [*own_rows(rows), *peer_rows(rows)])
    ratio = results.ratio(case, env_num, own, peer) if own and peer else None
    return [
        case,
        str(env_num),
        _named_rate(results, case, env_num, own),
        _named_rate(results, case, env_num, peer),
        NOTHING if ratio is None else f"{ratio:.2f} x",
        _spread(results, case, env_num, own),
        _library_name(best),
    ]


def _named_rate(results: Results, case: str, env_num: int, row: str | None) -> str:
    rate = None if row is None else results.median(case, env_num, row)
    if row is None or rate is None:
        return NOTHING
    return f"{ROWS[row].label.removeprefix('envmgr, ')}: {rate_text(rate)}"


def _spread(results: Results, case: str, env_num: int, row: str | None) -> str:
    """Return how far apart the rounds of a row are, as a share of their median."""
    if row is None:
        return NOTHING
    values = results.by_round(case, env_num, row, STEPS_PER_S).values()
    median = results.median(case, env_num, row)
    if median is None or len(values) < 2:
        return NOTHING
    return f"{100 * (max(values) - min(values)) / median:.0f} %"


def _library_name(row: str | None) -> str:
    return NOTHING if row is None else ROWS[row].label.partition(",")[0]


def targets_table(
    results: Results, only_measured: bool = False, of_all: Results | None = None
) -> Table:
    """Return the targets and what was reached.

    Args:
        results: of the targets' rows.
        only_measured: leave out the targets that were not measured.
        of_all: the results of all rows, for targets that count rows; None: `results` has all.
    """
    table = [["case", "what", "target", "reached", ""]]
    for target in TARGETS:
        counts = target.unit == COUNT and of_all is not None
        figure = target.reached(of_all if counts else results)
        bound = "at most" if target.at_most else "at least"
        goal = f"{bound} {target.goal:g} {target.unit}".rstrip()
        if figure is None:
            if not only_measured:
                table.append([target.case, target.wanted, goal, NOTHING, "not measured"])
            continue
        digits = 0 if target.unit == COUNT else 2 if target.unit == TIMES else 1
        verdict = "met" if target.met(figure) else "**missed**"
        reached = f"{figure:.{digits}f} {target.unit}".rstrip()
        table.append([target.case, target.wanted, goal, reached, verdict])
    return table


def bounds_table(results: Results) -> Table:
    """Return how near envmgr comes to processes that do nothing but step and ring."""
    head = ["case", "n", "envmgr", "rate", "rate without any library", "share of that rate"]
    table = [[*head, "us of CPU per step", "us of CPU without any library"]]
    for case in results.cases():
        for row in own_rows(results.rows(case)):
            for n in results.env_nums(case):
                bound = results.bound(case, n, row)
                rate = results.median(case, n, row)
                if bound is None or rate is None:
                    continue
                share = results.ratio(case, n, row, bound)
                table.append(
                    [
                        case,
                        str(n),
                        ROWS[row].label.removeprefix("envmgr, "),
                        _with_share(results, case, n, row),
                        _with_share(results, case, n, bound),
                        NOTHING if share is None else f"{100 * share:.0f} %",
                        _cpu_text(results, case, n, row),
                        _cpu_text(results, case, n, bound),
                    ]
                )
    return table


def _cpu_text(results: Results, case: str, env_num: int, row: str) -> str:
    """Return the processor time of a step: of the trainer, and of all workers together."""
    figures = ("trainer_us", "workers_us")
    parts = [results.median(case, env_num, row, figure) for figure in figures]
    return NOTHING if None in parts else " + ".join(f"{part:.1f}" for part in parts)


def _with_share(results: Results, case: str, env_num: int, row: str) -> str:
    share = results.share(case, env_num, row)
    text = rate_text(results.median(case, env_num, row) or 0.0)
    return text if share is None else f"{text} ({100 * share:.1f} %)"


def left_out_table(results: Results) -> Table:
    """Return which libraries and rows have no figure, and why: a line for each."""
    table = [["what", "where", "why"]]
    table += [[library, "everywhere", reason] for library, reason in results.peers_missing.items()]
    places: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for left_out in results.left_out:
        place, _, row = left_out.rpartition(" ")
        places.setdefault(row, []).append(place)
        # Messages of other libraries are no Markdown.
        reasons.setdefault(row, results.left_out[left_out].replace("`", "'"))
    table += [[ROWS[row].label, ", ".join(places[row]), reasons[row]] for row in places]
    return table


def markdown(table: Table) -> str:
    """Return a table as markdown."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in table]
    cells.insert(1, ["---"] * len(table[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def plain(table: Table) -> str:
    """Return a table for the terminal."""
    cells = [[cell.replace("**", "*").replace("`", "") for cell in line] for line in table]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines) + "\n"
