"""Interrupts: signals at every point of every public call, and at random moments of them."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from figures import Figure
from tests.faults import attacks
from tests.faults.interrupted_adapters import DRIVERS, Ding, Trained, trainers
from tests.faults.interrupted_calls import LARGE_INFOS, PROCESS_KINDS, THREAD_KINDS, Account
from tests.faults.interrupted_collectors import COLLECTORS, Collecting

# By fork, which starts workers fastest: some of the signals close the manager, so that another one
# is needed.
_PROCESSES = {name: {**config, "context": "fork"} for name, config in PROCESS_KINDS.items()}
_IN_THIS_PROCESS: dict[str, dict[str, Any]] = {"inline": {"type": "base"}, **THREAD_KINDS}
KINDS: dict[str, dict[str, Any]] = {
    **_IN_THIS_PROCESS,
    **_PROCESSES,
    "shared workers, large infos": LARGE_INFOS,
}
_A_WORKER_EACH = _PROCESSES["a worker each, in the block"]
_BESIDES = {
    "inline": KINDS["inline"],
    "by message, shared": _PROCESSES["by message, shared, some at a time"],
}
"""The kinds where fewer points will do, because an adapter does the same on every kind."""

AT_RANDOM, QUICK_AT_RANDOM = 10_000, 100
QUICK_POINTS = 100
SOME_POINTS, SOME_AT_RANDOM = 5_000, 2_000
TARGET = "0 stale, lost, repeated, hung or wedged"

Make = Callable[[], attacks.Subject]


class Attack(NamedTuple):
    """What one process attacks at a time.

    Attributes:
        name: of the figures.
        make: makes it.
        points: at so many points of its calls; None: at all of them.
        alarms: at so many random moments of its calls.
        without: the calls that no alarm is for.
        trainers: what has to be importable, or is replaced by a stand-in.
    """

    name: str
    make: Make
    points: int | None
    alarms: int
    without: Sequence[str]
    trainers: Sequence[str] = ()


def measure(quick: bool) -> Sequence[Figure]:
    """Attack each kind at points of its calls, then at random moments of them.

    The calls of a kind have some 70 000 points. Where workers may end with each signal, that would
    take hours: some points are drawn, others each time.
    """
    without = ("build", "close", "launch")
    return _carried_out(
        [
            Attack(
                name,
                partial(Account, config),
                None if name in _IN_THIS_PROCESS else SOME_POINTS,
                AT_RANDOM,
                without,
            )
            for name, config in KINDS.items()
        ],
        quick,
    )


def measure_trained(quick: bool) -> Sequence[Figure]:
    """Attack adapters and collectors in the same way."""
    names = ["sb3", "tianshou", "ding"]
    if importlib.util.find_spec("torch") is not None:
        names.append("torchrl")
    without = ("close", "reset_async")
    found = []
    for name, make_with in _subjects("torchrl" in names).items():
        for kind, config in {"a worker each": _A_WORKER_EACH, **_BESIDES}.items():
            points = None if config is _A_WORKER_EACH else SOME_POINTS
            make = make_with(config)
            found.append(Attack(f"{name}, {kind}", make, points, SOME_AT_RANDOM, without, names))
    return _carried_out(found, quick)


def _subjects(with_torch: bool) -> Mapping[str, Callable[[Any], Make]]:
    """Return what makes each subject with a config."""
    subjects: dict[str, Callable[[Any], Make]] = {
        name: partial(partial, Trained, driver)
        for name, driver in DRIVERS.items()
        if name != "as_torchrl" or with_torch
    }
    subjects["a manager of DI-engine"] = partial(partial, Ding)
    subjects.update({name: partial(partial, Collecting, name) for name in COLLECTORS})
    return subjects


def _carried_out(planned: Sequence[Attack], quick: bool) -> Sequence[Figure]:
    """Carry attacks out, as many at a time as there are cores: they take hours, and one core."""
    if quick:
        planned = [one._replace(points=QUICK_POINTS, alarms=QUICK_AT_RANDOM) for one in planned]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        return [figure for figures in pool.map(_attacked, planned) for figure in figures]


def _attacked(attack: Attack) -> Sequence[Figure]:
    gc.collect()
    gc.freeze()  # a collection in a forked worker, as it ends, would copy every page
    with trainers(*attack.trainers):
        return [
            _at_points(attack.name, attack.make, attack.points),
            _at_random(attack.name, attack.make, attack.alarms, attack.without),
        ]


def _at_points(name: str, make: Make, count: int | None) -> Figure:
    which = "all points" if count is None else f"{count:,} points"
    what = f"{name}: signals at {which} of calls"
    try:
        figures = attacks.run(make, count, random.randrange(1 << 32))
    except AssertionError as error:
        return Figure(what, str(error), TARGET, False)
    text = f"{figures['reached']} signals, {figures['raised']} calls ended by them: none"
    return Figure(what, text, TARGET, True)


def _at_random(name: str, make: Make, count: int, without: Sequence[str]) -> Figure:
    what = f"{name}: alarms at random moments of calls"
    try:
        n_raised = attacks.run_at_random(make, count, without=without)
    except AssertionError as error:
        return Figure(what, str(error), TARGET, False)
    return Figure(what, f"{count} alarms, {n_raised} calls ended by them: none", TARGET, True)
