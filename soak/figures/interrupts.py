"""Interrupts: signals at every point of every public call, and at random moments of them."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from figures import Figure
from tests.faults import attacks
from tests.faults.interrupted_adapters import DRIVERS, Ding, Trained, trainers
from tests.faults.interrupted_calls import LARGE_INFOS, PROCESS_KINDS, THREAD_KINDS, Account
from tests.faults.interrupted_collectors import COLLECTORS, Collecting

# By fork, which starts workers fastest: some of the signals close the manager, so that another one
# is needed.
_PROCESSES = {name: {**config, "context": "fork"} for name, config in PROCESS_KINDS.items()}
KINDS: dict[str, dict[str, Any]] = {
    "inline": {"type": "base"},
    **THREAD_KINDS,
    **_PROCESSES,
    "shared workers, large infos": LARGE_INFOS,
}
_A_WORKER_EACH = _PROCESSES["a worker each, in the block"]
_BESIDES = {
    "inline": {"type": "base"},
    "by message, shared": _PROCESSES["by message, shared, some at a time"],
}
"""The kinds where fewer points will do, because an adapter does the same on every kind."""

AT_RANDOM, QUICK_AT_RANDOM = 10_000, 100
QUICK_POINTS = 100
SOME_POINTS, SOME_AT_RANDOM = 5_000, 2_000
TARGET = "0 stale, lost, repeated, hung or wedged"

Make = Callable[[], attacks.Subject]


def measure(quick: bool) -> Sequence[Figure]:
    """Attack each kind at points of its calls, then at random moments of them."""
    _ready()
    figures = []
    for name, config in KINDS.items():
        make = partial(Account, config)
        figures.append(_at_points(name, make, QUICK_POINTS if quick else None))
        count = QUICK_AT_RANDOM if quick else AT_RANDOM
        figures.append(_at_random(name, make, count, ("build", "close", "launch")))
    return figures


def measure_trained(quick: bool) -> Sequence[Figure]:
    """Attack adapters and collectors in the same way."""
    _ready()
    names = ["sb3", "tianshou", "ding"]
    if importlib.util.find_spec("torch") is not None:
        names.append("torchrl")
    figures = []
    with trainers(*names):
        for name, make, is_whole in _subjects("torchrl" in names):
            count = None if is_whole else SOME_POINTS
            figures.append(_at_points(name, make, QUICK_POINTS if quick else count))
            count = QUICK_AT_RANDOM if quick else SOME_AT_RANDOM
            figures.append(_at_random(name, make, count, ("close", "reset_async")))
    return figures


def _subjects(with_torch: bool) -> Iterator[tuple[str, Make, bool]]:
    """Yield the name of each subject, what makes it, and whether to attack it at all points."""
    subjects: dict[str, Callable[[Any], Make]] = {
        name: partial(partial, Trained, driver)
        for name, driver in DRIVERS.items()
        if name != "as_torchrl" or with_torch
    }
    subjects["a manager of DI-engine"] = partial(partial, Ding)
    subjects.update({name: partial(partial, Collecting, name) for name in COLLECTORS})
    for name, make_with in subjects.items():
        yield f"{name}, a worker each", make_with(_A_WORKER_EACH), True
        for kind, config in _BESIDES.items():
            yield f"{name}, {kind}", make_with(config), False


def _ready() -> None:
    gc.collect()
    gc.freeze()  # a collection in a forked worker, as it ends, would copy every page


def _at_points(name: str, make: Make, count: int | None) -> Figure:
    what = f"{name}: signals at points of calls"
    try:
        figures = attacks.run(make, count)
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
