"""envmgr's goals on two cores, and how far a run reached them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from cases import BELOW_DOORS, BOUNDS, CASES, DOORS, DOORS_N, Item
from results import CPU_US, STEPS_PER_S, Results, own_rows, peer_rows
from rows import ROWS
from spec import LIFETIME

TIMES, SHARE, SECONDS, MEGABYTES, COUNT = "x", "%", "s", "MB", ""
MICROSECONDS, PER_BATCH = "us", "us per batch"


@dataclass(frozen=True)
class Target:
    """One goal.

    Attributes:
        case: the case and the number of envs, or `all rates`.
        wanted: the figure, in words.
        goal: the figure to reach.
        unit: the unit of the goal and of the figure.
        reached: computes the figure from results; None if it was not measured.
        at_most: whether the goal is an upper bound.
    """

    case: str
    wanted: str
    goal: float
    unit: str
    reached: Callable[[Results], float | None]
    at_most: bool = False

    def met(self, figure: float) -> bool:
        """Return whether a figure reaches the goal."""
        return figure <= self.goal if self.at_most else figure >= self.goal


def _times(case: str, n: int, row: str, other: str, goal: float) -> Target:
    wanted = f"{ROWS[row].label}: rate, over that of {ROWS[other].label}"
    return Target(
        f"{case}, n={n}", wanted, goal, TIMES, lambda results: results.ratio(case, n, row, other)
    )


def _share(case: str, n: int, rows: list[str], goal: float) -> Target:
    names = ROWS[rows[0]].label if len(rows) == 1 else "envmgr's fastest way on 2 workers"

    def reached(results: Results) -> float | None:
        row = results.fastest(case, n, rows)
        share = results.share(case, n, row) if row else None
        return None if share is None else 100 * share

    return Target(
        f"{case}, n={n}",
        f"{names}: share of the ideal ({CASES[case].ideal})",
        goal,
        SHARE,
        reached,
    )


def _fastest_times(
    case: str, n: int, rows: list[str], words: str, other: str, goal: float
) -> Target:
    def reached(results: Results) -> float | None:
        row = results.fastest(case, n, rows)
        return results.ratio(case, n, row, other) if row else None

    wanted = f"envmgr, arrays, {words}: rate, over that of {ROWS[other].label}"
    return Target(f"{case}, n={n}", wanted, goal, TIMES, reached)


def _median(n: int, figure: str, goal: float, unit: str, words: str) -> Target:
    return Target(
        f"start, n={n}",
        f"CartPole packed on 2 workers: {words}",
        goal,
        unit,
        lambda results: results.median("start", n, "hosts2-dict", figure),
        at_most=True,
    )


def _price_of_safety(results: Results) -> float | None:
    ratio = results.ratio("busy", 16, "hosts2-unchecked", "hosts2-checked")
    return None if ratio is None else 100 * (ratio - 1)


def rows_won_by_peers(results: Results) -> list[tuple[str, int]]:
    """Return (case, env_num) wherever a peer that steps the same envs has the highest rate."""
    won: list[tuple[str, int]] = []
    for case in results.cases():
        if CASES[case].kind == LIFETIME:
            continue
        rows = [row for row in results.rows(case) if not ROWS[row].is_native]
        won += [
            (case, n)
            for n in results.env_nums(case)
            if results.fastest(case, n, [*own_rows(rows), *peer_rows(rows)]) in peer_rows(rows)
        ]
    return won


def _cpu_times(case: str, n: int, row: str, other: str, goal: float) -> Target:
    return Target(
        f"{case}, n={n}",
        f"{ROWS[row].label}: CPU per env step, over that of {ROWS[other].label}",
        goal,
        TIMES,
        lambda results: results.cpu_ratio(case, n, row, other),
        at_most=True,
    )


def _cpu_above(case: str, n: int, row: str, other: str, goal: float) -> Target:
    return Target(
        f"{case}, n={n}",
        f"{ROWS[row].label}: CPU per env step, minus that of {ROWS[other].label}",
        goal,
        MICROSECONDS,
        lambda results: results.cpu_above(case, n, row, other),
        at_most=True,
    )


def _trainer(case: str, n: int, row: str, goal: float) -> Target:
    return Target(
        f"{case}, n={n}",
        f"{ROWS[row].label}: CPU of the trainer per env step",
        goal,
        MICROSECONDS,
        lambda results: results.median(case, n, row, CPU_US[0]),
        at_most=True,
    )


def _workers(case: str, n: int, row: str, goal: float) -> Target:
    return Target(
        f"{case}, n={n}",
        f"{ROWS[row].label}: CPU of the workers per env step, minus that of a plain loop",
        goal,
        MICROSECONDS,
        lambda results: results.workers_above(case, n, row, "plain-all"),
        at_most=True,
    )


def _infos(n: int, row: str, goal: float) -> Target:
    def reached(results: Results) -> float | None:
        costs, bare = (results.cpu_by_round(case, n, row) for case in _WITH_AND_WITHOUT)
        # Infos are also measured in processes: an env costs more beside a busy process than alone.
        stepped, nothing = (results.cpu_by_round(case, n, "bare-2") for case in _WITH_AND_WITHOUT)
        rounds = costs.keys() & bare.keys() & stepped.keys() & nothing.keys()
        ratios = [(costs[k] - (stepped[k] - nothing[k])) / bare[k] for k in rounds]
        return statistics.median(ratios) if ratios else None

    return Target(
        f"null-floats, n={n}",
        f"{ROWS[row].label}: CPU per env step, minus what infos cost 2 processes without any "
        "library, over that in the case null",
        goal,
        TIMES,
        reached,
        at_most=True,
    )


def _limits(n: int) -> Target:
    def reached(results: Results) -> float | None:
        above_us = results.cpu_above("null", n, "hosts2-limits", "hosts2-arrays")
        return None if above_us is None else n * above_us

    return Target(
        f"null, n={n}",
        "CPU that `step_timeout` and `metrics` take, on 2 workers",
        2.0 + 0.1 * n,
        PER_BATCH,
        reached,
        at_most=True,
    )


def _auto(case: str, n: int) -> Target:
    def reached(results: Results) -> float | None:
        best = results.fastest(case, n, _WORKERS)
        share = results.ratio(case, n, "auto-arrays", best) if best else None
        return None if share is None else 100 * share

    return Target(
        f"{case}, n={n}",
        "`num_workers: auto`, arrays: rate, over that of the fastest of 1, 2, 4 workers and "
        "a worker per env",
        90.0,
        SHARE,
        reached,
    )


_WITH_AND_WITHOUT = ("null-floats", "null")
_WORKERS = ["hosts1-arrays", "hosts2-arrays", "hosts4-arrays", "each-arrays"]
_RING = ["hosts1-ring", "hosts2-ring"]
_IN_LINE = ["base-until-send"]
_UNTIL_SEND = ["hosts1-until-send", "hosts2-until-send"]
_ON_TWO_HOSTS = [
    "hosts2-dict",
    "hosts2-arrays",
    "hosts2-dict-pipelined",
    "hosts2-arrays-pipelined",
]
_NOCOPY = "gymnasium-async-nocopy"

TARGETS = (
    _times("null", 8, "subprocess", "gymnasium-async", 2.5),
    _times("null", 8, "subprocess", "ding-subprocess", 2.5),
    *(
        _times(case, 8, "subprocess-v2", other, goal)
        for case in ("null", "array-reward")
        for other, goal in (("gymnasium-async", 1.2), ("ding-subprocess-v2", 4))
    ),
    _times("null", 8, "hosts1-arrays", "gymnasium-async", 25),
    _times("null", 8, "hosts1-arrays", "pufferlib-1", 1.2),
    _times("null", 8, "base-arrays", "pufferlib-serial", 1.2),
    _times("null", 64, "base-arrays", "pufferlib-serial", 3.0),
    *(_times("null", n, "base-arrays", "gymnasium-sync", 1.0) for n in (1, 8, 64)),
    _cpu_times("null", 64, "hosts2-arrays", "bare-2", 1.6),
    _cpu_times("null", 64, "hosts2-dict", "bare-2", 2.5),
    _limits(8),
    _limits(64),
    _infos(64, "hosts2-arrays", 1.2),
    _infos(64, "as-gymnasium", 1.3),
    _cpu_above("halfcheetah", 8, "base-arrays", "gymnasium-sync", 0.0),
    _cpu_above("halfcheetah", 8, "base-pure", "plain-all", 30.0),
    _trainer("halfcheetah", 8, "as-gymnasium", 15.0),
    _workers("halfcheetah", 8, "as-gymnasium", 12.0),
    _trainer("minigrid", 8, "as-gymnasium", 40.0),
    _auto("pong", 8),
    _auto("pong", 16),
    _auto("halfcheetah", 8),
    _auto("minigrid", 8),
    _times("null", 64, "hosts2-arrays", "gymnasium-async", 30),
    _times("null", 64, "hosts2-dict", "gymnasium-async", 10),
    _share("cartpole", 64, ["hosts2-arrays"], 68),
    _share("cartpole", 64, ["hosts2-arrays-pipelined"], 85),
    _share("cartpole", 64, ["hosts2-dict-pipelined"], 72),
    _times("cartpole", 64, "hosts2-arrays", "gymnasium-async", 10),
    *(
        _times(case, 64, "hosts2-arrays", other, goal)
        for case, bare in (("cartpole", 0.85), ("cartpole-short", 0.75))
        for other, goal in (
            ("bare-2", bare),
            ("pufferlib-1", 1.0),
            ("pufferlib-serial", 1.0),
            ("gymnasium-sync", 1.0),
        )
    ),
    _times("null", 64, "as-gymnasium", "gymnasium-async", 20),
    _times("null", 64, "as-gymnasium", "hosts2-arrays", 0.85),
    _times("cartpole", 64, "as-gymnasium", "gymnasium-async", 8),
    _times("null", 64, "as-sb3", "sb3-subproc", 15),
    _times("null", 64, "as-sb3", "hosts2-arrays", 0.85),
    _times("null", 64, "as-tianshou", "tianshou-shmem", 10),
    _times("null", 64, "as-tianshou", "hosts2-arrays", 0.85),
    _share("busy", 16, _ON_TWO_HOSTS, 93),
    _share("busy", 64, _ON_TWO_HOSTS, 97),
    _fastest_times("image", 64, _UNTIL_SEND, "views until the next send", _NOCOPY, 15),
    _fastest_times("image", 64, _RING, "two-step views", _NOCOPY, 15),
    *(
        _fastest_times(case, n, rows, "views until the next send", other, 1.0)
        for case, n in (("image", 64), ("frame", 16), ("frame", 64))
        for rows, other in ((_UNTIL_SEND, "pufferlib-1"), (_IN_LINE, "pufferlib-serial"))
    ),
    _fastest_times("frame", 16, _UNTIL_SEND, "views until the next send", _NOCOPY, 8),
    _fastest_times("frame", 16, _RING, "two-step views", _NOCOPY, 8),
    _share("uneven", 16, ["async-1"], 95),
    _share("uneven", 64, ["async-1"], 90),
    Target(
        "cartpole, n=256",
        f"{ROWS['hosts2-arrays'].label}: cost of an env step, over that with n=16",
        1.0,
        TIMES,
        lambda results: results.growth("cartpole", "hosts2-arrays", 256, 16),
        at_most=True,
    ),
    _median(256, "start_s", 2.0, SECONDS, "time until all envs are ready"),
    _median(256, "pss_mb", 200.0, MEGABYTES, "memory, trainer included"),
    Target(
        "busy, n=16",
        "price of all checks and deadlines, on 2 workers",
        5.0,
        SHARE,
        _price_of_safety,
        at_most=True,
    ),
    Target(
        "all rates",
        "rows in which a peer that steps the same envs is the fastest",
        3,
        COUNT,
        lambda results: float(len(rows_won_by_peers(results))) if results.measurements else None,
        at_most=True,
    ),
)


class _Asked(Results):
    """Results that have every figure, and record the items that they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[Item, None] = {}

    def by_round(
        self, case: str, env_num: int, row: str, figure: str = STEPS_PER_S
    ) -> dict[int, float]:
        """Return 1.0 for one round, and record the item."""
        self.items[Item(case, env_num, row)] = None
        return {1: 1.0}


_REPORTED = (Item("null", 1, "pufferlib-serial"),)
"""Items that are reported beside targets, but have no target themselves."""


def items() -> list[Item]:
    """Return the items to measure for the targets and for the tables beside them."""
    asked = _Asked()
    for target in TARGETS:
        target.reached(asked)
    again = [
        Item(key, n, row)
        for key, case in CASES.items()
        for n, rows in case.rows.items()
        for row in rows
        if ROWS[row].again
    ]
    doors = [Item("null", n, row) for n in DOORS_N for row in (*DOORS, BELOW_DOORS)]
    wanted = [*asked.items, *again, *doors, *_REPORTED]
    bounds = [
        Item(item.case, item.env_num, BOUNDS[item.case, item.row])
        for item in wanted
        if (item.case, item.row) in BOUNDS
    ]
    here = [item for item in bounds if item.row in CASES[item.case].rows[item.env_num]]
    return list(dict.fromkeys([*wanted, *here]))
