"""Views that refuse to be used after their time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from envmgr.core.observations import STEPS, CheckedView, Observed, ViewGuard
from envmgr.errors import StaleViewError


class Pair(NamedTuple):
    one: Any
    other: Any


USES: dict[str, Callable[[Any], Any]] = {
    "index": lambda view: view[0],
    "slice": lambda view: view[1:],
    "iterate": list,
    "add": lambda view: view + 1,
    "add from the left": lambda view: 1 + view,
    "compare": lambda view: view == 0,
    "sum": lambda view: view.sum(),
    "np.sum": np.sum,
    "mean": lambda view: view.mean(),
    "max": lambda view: view.max(),
    "a product": lambda view: view.dot(view),
    "cumsum": lambda view: view.cumsum(),
    "flatten": lambda view: view.flatten(),
    "ravel": lambda view: view.ravel() + 1,
    "another shape": lambda view: view.reshape(-1)[0],
    "transposed": lambda view: view.T[0],
    "sort in place": lambda view: view.sort(),
    "fill": lambda view: view.fill(1.0),
    "a number of it": lambda view: float(view[:1].reshape(())),
    "truth": lambda view: bool(view[:1]),
    "contains": lambda view: 3.0 in view,
    "format": lambda view: f"{view}",
    "deep copy": copy.deepcopy,
    "stack": lambda view: np.stack([view, view]),
    "concatenate": lambda view: np.concatenate((view, np.zeros(1))),
    "a named tuple": lambda view: np.stack(Pair(view, view)),
    "copy": lambda view: view.copy(),
    "astype": lambda view: view.astype(np.float32),
    "tolist": lambda view: view.tolist(),
    "tobytes": lambda view: view.tobytes(),
    "item": lambda view: view.item(0),
    "repr": repr,
    "str": str,
    "pickle": pickle.dumps,
    "write": lambda view: view.__setitem__(0, 1.0),
    "write into": lambda view: np.add(1, 1, out=view),
    "a part of it": lambda view: view[1:] + 1,
}


def checked() -> tuple[ViewGuard, Any]:
    guard = ViewGuard(3)
    return guard, guard.wrap([1], np.arange(4.0))


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_every_use_is_allowed_in_time_and_refused_after_it(use: Callable[[Any], Any]) -> None:
    guard, view = checked()
    part = view[:]
    for request in range(1, STEPS + 1):
        guard.count([1], request)
        use(view)
    guard.count([1], STEPS + 1)
    for stale in (view, part):
        with pytest.raises(StaleViewError, match=r"env 1 .* 3 actions"):
            use(stale)


def test_a_request_that_an_interrupt_had_sent_twice_counts_once() -> None:
    guard, view = checked()
    for request in range(1, STEPS + 1):
        for _ in range(3):
            guard.count([1], request)
    assert view.tolist() == [0, 1, 2, 3]


def test_who_holds_the_observations_counts_what_is_sent() -> None:
    guard, view = checked()
    observed = Observed(3)
    observed.open([], guard)
    for request in range(STEPS + 1):
        view.tolist()
        observed.counted([1], request + 1)
    with pytest.raises(StaleViewError):
        view.tolist()


def test_steps_of_other_envs_do_not_matter() -> None:
    guard, view = checked()
    for request in range(1, 10):
        guard.count([0, 2], request)
    assert view.tolist() == [0, 1, 2, 3]


def test_a_batch_is_as_old_as_its_oldest_row() -> None:
    guard = ViewGuard(2)
    batch = guard.wrap([0, 1], np.zeros((2, 3)))
    for request in range(1, STEPS + 2):
        guard.count([1], request)
    with pytest.raises(StaleViewError, match="env 1"):
        batch.sum()


def test_what_is_computed_is_an_ordinary_array() -> None:
    guard, view = checked()
    results = [
        view + 1,
        view.copy(),
        view.astype(int),
        view.flatten(),
        view.cumsum(),
        copy.deepcopy(view),
        np.stack([view]),
        pickle.loads(pickle.dumps(view)),
    ]
    assert [type(result) for result in results] == [np.ndarray] * len(results)
    assert type(view[1:]) is CheckedView
    for request in range(1, STEPS + 2):
        guard.count([1], request)
    assert results[0].tolist() == [1, 2, 3, 4]


def test_numbers_are_left_as_they_are() -> None:
    number = np.int64(3)
    assert ViewGuard(1).wrap([0], number) is number
