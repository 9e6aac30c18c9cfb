"""What was measured, and what follows from it: medians, ratios, shares of the ideal."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cases import BOUNDS, CASES, CORES, SLEEP, Item
from rows import BARE, IDEAL, OWN, ROWS

STEPS_PER_S = "steps_per_s"
CPU_US = ("trainer_us", "workers_us")
_IDEAL_ROW = "plain-2"

BUSY = 0.1
"""Of all cores: if others take more, CPU per step stands before rates."""


@dataclass(frozen=True)
class Measurement:
    """The figures of one item in one round."""

    case: str
    env_num: int
    row: str
    round: int
    figures: dict[str, float]


@dataclass
class Results:
    """All measurements of a run.

    Attributes:
        measurements: in the order in which they were taken.
        left_out: `case n row` -> why there is no figure.
        peers_missing: library -> why it is not installed.
        sleep_ideals: case -> env steps per second of one env that only sleeps.
        machine: where, see `machine.describe`.
        settings: how; `runs` are the runs that have measured all this, one after the other.
    """

    measurements: list[Measurement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    peers_missing: dict[str, str] = field(default_factory=dict)
    sleep_ideals: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def drop(self, cases: Collection[str]) -> None:
        """Forget what was measured in cases, why it was left out, and the runs that did it."""
        self.measurements = [m for m in self.measurements if m.case not in cases]
        self.left_out = {
            place: why for place, why in self.left_out.items() if place.split()[0] not in cases
        }
        for run in self.runs:
            run["cases"] = [case for case in run["cases"] if case not in cases]
        self.settings["runs"] = [run for run in self.runs if run["cases"]]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that have measured all this: `date`, `rounds`, `cases`, what others `taken`."""
        runs: list[dict[str, Any]] = self.settings.setdefault("runs", [])
        return runs

    @property
    def was_busy(self) -> bool:
        """Whether others took so much of the machine that rates say little."""
        return any(sum(run.get("taken", {}).values()) > BUSY for run in self.runs)

    def add(self, item: Item, round_: int, figures: dict[str, float]) -> None:
        """Keep the figures of an item."""
        self.measurements.append(Measurement(item.case, item.env_num, item.row, round_, figures))

    def leave_out(self, item: Item, reason: str) -> None:
        """Keep why an item has no figure."""
        self.left_out[_place(item)] = reason

    def is_left_out(self, item: Item) -> bool:
        """Return whether an item has no figure."""
        return _place(item) in self.left_out

    def by_round(
        self, case: str, env_num: int, row: str, figure: str = STEPS_PER_S
    ) -> dict[int, float]:
        """Return one figure of an item, by round."""
        return {
            m.round: m.figures[figure]
            for m in self.measurements
            if (m.case, m.env_num, m.row) == (case, env_num, row) and figure in m.figures
        }

    def median(self, case: str, env_num: int, row: str, figure: str = STEPS_PER_S) -> float | None:
        """Return the median over the rounds; None if nothing was measured."""
        values = self.by_round(case, env_num, row, figure)
        return statistics.median(values.values()) if values else None

    def ratio(self, case: str, env_num: int, row: str, other: str) -> float | None:
        """Return how many times as fast as another row; the median of the rounds' ratios."""
        return _ratio(self.by_round(case, env_num, row), self.by_round(case, env_num, other))

    def cpu_by_round(self, case: str, env_num: int, row: str) -> dict[int, float]:
        """Return us of CPU per env step, of trainer and workers together, by round."""
        trainer, workers = (self.by_round(case, env_num, row, figure) for figure in CPU_US)
        return {
            round_: trainer[round_] + workers[round_] for round_ in trainer if round_ in workers
        }

    def cpu_ratio(self, case: str, env_num: int, row: str, other: str) -> float | None:
        """Return how many times the CPU of another row; the median of the rounds' ratios."""
        ours, theirs = (self.cpu_by_round(case, env_num, key) for key in (row, other))
        return _ratio(ours, theirs)

    def cpu_above(self, case: str, env_num: int, row: str, other: str) -> float | None:
        """Return how many us of CPU per env step more than another row; the rounds' median."""
        ours, theirs = (self.cpu_by_round(case, env_num, key) for key in (row, other))
        return median_above(ours, theirs)

    def workers_above(self, case: str, env_num: int, row: str, other: str) -> float | None:
        """Return how many us of CPU workers take above a row without any; the rounds' median."""
        workers = self.by_round(case, env_num, row, CPU_US[1])
        return median_above(workers, self.cpu_by_round(case, env_num, other))

    def again(self) -> list[tuple[str, int, str]]:
        """Return (case, env_num, row) of rows that were measured once more."""
        found = {(m.case, m.env_num, m.row): None for m in self.measurements}
        return [place for place in found if ROWS[place[2]].again]

    def growth(self, case: str, row: str, env_num: int, fewer: int) -> float | None:
        """Return the cost per env step with `env_num` envs, over that with `fewer`."""
        return _ratio(self.by_round(case, fewer, row), self.by_round(case, env_num, row))

    def share(self, case: str, env_num: int, row: str) -> float | None:
        """Return the share of the case's ideal; None if it has none, or it was not measured."""
        ideal = CASES[case].ideal
        if ideal == CORES:
            return _ratio(self.by_round(case, env_num, row), self.by_round(case, 1, _IDEAL_ROW))
        rate = self.median(case, env_num, row)
        if ideal == SLEEP and rate is not None and case in self.sleep_ideals:
            return rate / (env_num * self.sleep_ideals[case])
        return None

    def fastest(self, case: str, env_num: int, rows: Sequence[str]) -> str | None:
        """Return the row with the highest median rate, of those that were measured."""
        rates = {row: self.median(case, env_num, row) for row in rows}
        measured = {row: rate for row, rate in rates.items() if rate is not None}
        return max(measured, key=lambda row: measured[row]) if measured else None

    def rows(self, case: str) -> list[str]:
        """Return the rows that were measured in a case, in the order of `ROWS`, ideals left out."""
        seen = {m.row for m in self.measurements if m.case == case}
        return [row for row in ROWS if row in seen and row not in CASES[case].ideal_rows]

    def bound(self, case: str, env_num: int, row: str) -> str | None:
        """Return the row that shows what bounds a row of envmgr; None if it was not measured."""
        bound = BOUNDS.get((case, row))
        return bound if bound and self.median(case, env_num, bound) else None

    def env_nums(self, case: str) -> list[int]:
        """Return the numbers of envs that were measured in a case, ascending, ideals left out."""
        ideals = CASES[case].ideal_rows
        return sorted(
            {m.env_num for m in self.measurements if m.case == case and m.row not in ideals}
        )

    def cases(self) -> list[str]:
        """Return the cases that were measured, in the order of `CASES`."""
        seen = {m.case for m in self.measurements}
        return [case for case in CASES if case in seen]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as it goes into results.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Results:
        """Return what `to_dict` gave."""
        measurements = [Measurement(**m) for m in content["measurements"]]
        return cls(**{**content, "measurements": measurements})


def _place(item: Item | Measurement) -> str:
    return f"{item.case} n={item.env_num} {item.row}"


def own_rows(rows: Sequence[str]) -> list[str]:
    """Return the rows of envmgr among these, without those that are measured once more."""
    return [row for row in rows if ROWS[row].library == OWN and not ROWS[row].again]


def peer_rows(rows: Sequence[str]) -> list[str]:
    """Return the rows of the other libraries among these."""
    return [row for row in rows if ROWS[row].library not in (OWN, BARE, IDEAL)]


def median_above(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    """Return the median of the rounds' differences; None if they have no round in common."""
    differences = [ours[round_] - theirs[round_] for round_ in ours if round_ in theirs]
    return statistics.median(differences) if differences else None


def _ratio(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    ratios = [ours[round_] / theirs[round_] for round_ in ours if round_ in theirs]
    return statistics.median(ratios) if ratios else None
