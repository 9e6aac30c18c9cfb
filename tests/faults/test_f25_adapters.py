"""F25 for adapters and collectors: an interrupt at any point of any call, and then going on.

Here some points, drawn with a seed; `make soak` takes all of them, and random moments.
"""

from __future__ import annotations

import dis
import gc
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.faults import attacks, interrupting
from tests.faults.interrupted_adapters import DRIVERS, Ding, Trained, trainers
from tests.faults.interrupted_collectors import COLLECTORS, Collecting

FORK = {"type": "subprocess", "context": "fork"}
SOME = {**FORK, "type": "async_subprocess", "shared_memory": False, "num_workers": 2}
INLINE = {"type": "base"}


@pytest.fixture(autouse=True)
def their_trainers() -> Iterator[None]:
    with trainers("sb3", "tianshou", "ding"):
        yield


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.torch if name == "as_torchrl" else ())
        for name in DRIVERS
    ]
)
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param != "as_torchrl":
        yield DRIVERS[request.param]
        return
    pytest.importorskip("torch")
    with trainers("torchrl"):
        yield DRIVERS[request.param]


class InterruptedOnce:
    """A method that Ctrl-C comes into, once."""

    def __init__(
        self, manager: Any, name: str, patch: pytest.MonkeyPatch, *, is_after: bool
    ) -> None:
        self._method, self._patch, self._is_after = getattr(manager, name), patch, is_after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._patch.undo()
        if self._is_after:
            self._method(*args, **kwargs)
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_f25_ctrl_c_beside_a_call_of_the_manager(
    driver: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Trained(driver, INLINE)
    methods = [
        "send_arrays",
        "ready_arrays",
        "reset",
        "reset_infos",
        "apply",
        "call_with",
        "get_attr",
    ]
    if when == "before":  # what has returned lies in the adapter: nothing comes between
        methods += ["recv_arrays", "call_wait"]
    struck = set()
    in_threads = ("reset_async", "reset_wait")  # where no signal handler runs
    for call in [name for name in subject.names[:-1] if name not in in_threads]:
        for method in methods:
            subject.prepare(call)
            with monkeypatch.context() as patch:
                once = InterruptedOnce(subject.manager, method, patch, is_after=when == "after")
                patch.setattr(subject.manager, method, once)
                results, raised = [], None
                try:
                    results.append(subject.call(call))
                except KeyboardInterrupt as error:
                    raised = error
                    struck.add(method)
            subject.settle(call, results, raised, is_past=False)
    subject.close()
    assert struck >= {"send_arrays", "ready_arrays", "reset"}


def attack(make: Any, *runs: tuple[Any, int, int], raised: float) -> None:
    """Interrupt subjects of some configs at so many points, with so many calls before each."""
    total = reached = 0
    for config, count, calls in runs:
        figures = attacks.run(partial(make, config), count, seed=25, calls=calls)
        assert figures["points"] == count
        assert figures["raised"] > figures["reached"] * raised
        assert config is INLINE or not figures["abnormal"]
        total, reached = total + count, reached + figures["reached"]
    assert reached > total / 2  # where envs have processes, their timing may pass by most points


def test_f25_an_adapter_goes_on_or_says_how_after_an_interrupt_anywhere(driver: Any) -> None:
    attack(partial(Trained, driver), (INLINE, 40, 6), (FORK, 12, 2), raised=0.7)


def test_f25_where_an_adapter_waits_for_a_thread_an_interrupt_comes_through() -> None:
    make = partial(Trained, DRIVERS["as_gymnasium, NEXT_STEP"], FORK)
    figures = attacks.run(make, 60, seed=25, within=threading.__file__)
    assert figures["points"] == 60
    assert figures["raised"] > 30


@pytest.mark.parametrize("name", COLLECTORS)
def test_f25_a_collector_has_every_step_once_after_an_interrupt_anywhere(name: str) -> None:
    attack(partial(Collecting, name), (INLINE, 20, 2), (SOME, 10, 1), raised=0.6)


def test_f25_the_returns_that_di_engine_reads_count_every_reward_once() -> None:
    figures = attacks.run(partial(Ding, INLINE), 60, seed=25, calls=4)
    assert figures["raised"] > 30


@pytest.mark.parametrize("name", ["as_gymnasium, NEXT_STEP", "as_sb3", "as_tianshou, wait_num"])
def test_f25_an_adapter_at_random_moments(name: str) -> None:
    make = partial(Trained, DRIVERS[name], FORK)
    assert attacks.run_at_random(make, 25, seed=25, without=("close", "reset_async")) > 1


def test_f25_of_points_past_delivery_those_of_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = Trained(DRIVERS["as_sb3"], INLINE)
    monkeypatch.setattr(Trained, "names", ["finish 0"])
    points = {point for _, point, _ in attacks.drawn(subject, None, 0)}
    subject.close()
    past = {p.code.co_name for p in points if attacks.at_point(p, signal.SIGINT).is_past(OSError())}
    assert past == {"step_wait"}


def test_f25_at_its_return_a_function_has_delivered_whichever_return_it_is() -> None:
    subject = Trained(DRIVERS["as_tianshou, wait_num"], INLINE)
    step = type(subject.driver.env).step.__code__
    subject.close()
    returns = [i.offset for i in dis.get_instructions(step) if i.opname == "RETURN_VALUE"]
    assert len(returns) > 1
    points = [attacks.Point(step, at, is_opcode=True, hit=1) for at in returns]
    assert all(attacks.at_point(point, signal.SIGINT).is_past(OSError()) for point in points)


def test_f25_while_signals_may_come_no_callback_of_others_runs_in_a_collection() -> None:
    phases: list[str] = []

    def callback(phase: str, info: Any) -> None:  # what a handler raises in it is lost
        phases.append(phase)

    gc.callbacks.append(callback)
    try:
        with interrupting.handlers(lambda: None):
            gc.collect()
        assert phases == []
        gc.collect()
        assert phases
    finally:
        gc.callbacks.remove(callback)
