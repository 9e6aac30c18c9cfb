"""Waiting on a clock that is moved by hand: deadlines, warnings, closing, gathering."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from envmgr.core import Phase, Selection
from envmgr.core import engine as engine_module
from envmgr.core.engine import (
    LOOK_EVERY_S,
    NARROW_S,
    WARN_EVERY_S,
    Engine,
    await_all_ready,
    await_one_ready,
    refuse_unready,
)
from envmgr.core.failures import NoMemoryYet
from envmgr.core.table import Window
from envmgr.env.batch_specs import Batch
from envmgr.errors import (
    ConcurrentCallError,
    ManagerClosedError,
    NothingReadyError,
    OutOfMemoryError,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy
from envmgr.wire.block import RING_LAST, RING_ONCE
from envmgr.wire.messages import AfterStep, FailureKind, Op
from tests.fake_hosts import FakeEnvs
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import rows_of_batches, rows_reset_in_next_step

pytestmark = over_routes


def never() -> bool:
    return False


# -- waiting --------------------------------------------------------------------------------------


def test_what_is_finished_already_waits_for_nothing() -> None:
    rig = Rig().launch()
    polls = len(rig.transport.polls)
    assert rig.engine.wait_until(lambda: True, deadline=-1.0, doing="this")
    assert len(rig.transport.polls) == polls


def test_a_wait_ends_at_its_deadline() -> None:
    rig = Rig().launch()
    began = rig.clock()
    assert not rig.engine.wait_until(never, deadline=began + 2.5, doing="this")
    assert rig.clock() == began + 2.5
    assert rig.engine.now() == rig.clock()


def test_a_deadline_that_has_passed_does_not_even_look() -> None:
    rig = Rig().launch()
    polls = len(rig.transport.polls)
    assert not rig.engine.wait_until(never, deadline=rig.clock(), doing="this")
    assert not rig.engine.wait_for(never, -1.0)
    assert len(rig.transport.polls) == polls


def test_a_wait_ends_with_the_arrival_that_finishes_it() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=3.0)
    began = rig.clock()
    assert rig.engine.wait_until(lambda: rig.has_arrived(), doing="step")
    assert rig.clock() == began + 3.0


def test_everything_is_applied_in_its_moment_while_something_else_is_waited_for() -> None:
    policy = FailurePolicy(max_retry=2, retry_waiting_s=0.5)
    rig = Rig(2, policy=policy).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=3.0)
    rig.reset(1)
    rig.transport.fail(1, "reset", after_s=1.0)
    moments = []

    def finished() -> bool:
        moments.append((rig.clock() - began, rig.slot(1).phase))
        return rig.has_arrived()

    began = rig.clock()
    rig.engine.wait_until(finished, doing="step")
    assert moments == [
        (0.0, Phase.RESETTING),
        (1.0, Phase.PAUSING),
        (1.5, Phase.RESETTING),  # the retry began behind the step that was waited for
        (3.0, Phase.RESETTING),
    ]


def test_limits_of_requests_pass_during_a_wait() -> None:
    rig = Rig(2, deadlines=Deadlines(step_s=2.0)).launch()
    rig.send(0)
    began = rig.clock()
    rig.engine.wait_until(lambda: rig.has_arrived(), doing="step")
    assert rig.clock() == began + 2.0
    assert rig.slot().timestep is not None
    assert rig.slot().timestep.info["abnormal"]


def test_a_reply_that_arrives_at_the_very_limit_counts() -> None:
    rig = Rig(deadlines=Deadlines(step_s=2.0)).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=2.0)
    rig.engine.wait_until(lambda: rig.has_arrived(), doing="step")
    assert rig.deliver(0)[0].obs == "next"


def test_what_came_while_nobody_looked_is_seen_before_limits_are_enforced() -> None:
    rig = Rig(2, deadlines=Deadlines(step_s=2.0)).launch()
    rig.send({0: 1, 1: 1})
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=1.0)
    rig.clock.advance(100.0)  # the trainer computes
    rig.engine.collect()
    assert rig.deliver(1)[1].obs == "next"
    assert rig.deliver(0)[0].info["abnormal"]


def test_collecting_does_not_wait() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=1.0)
    began = rig.clock()
    rig.engine.collect()
    assert rig.clock() == began
    assert rig.slot().timestep is None


def test_envs_that_take_their_time_are_watched_for_less_until_one_does_not() -> None:
    rig, ticks = Rig(has_block=True).launch(), itertools.count()
    engine = Engine(
        rig.supervisor,
        rig.transport,
        lambda: float(next(ticks)),
        background=False,
        spin_s=32.0,
    )
    looks: list[int] = []

    def watch(found: bool = False) -> int:
        looks.clear()
        assert engine.see_to(lambda: looks.append(0) or found, sleeps=False) is found
        return len(looks)

    tries = [watch() for _ in range(7)]
    assert tries == sorted(tries, reverse=True)
    assert 0 < tries[6] == tries[5] < tries[0] / 8  # it is tried again and again
    assert watch(found=True) == 1
    assert watch() == tries[0]


def test_a_wait_without_end_has_the_transport_wait_for_the_next_warning_at_most() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.engine.wait_until(never, deadline=rig.clock() + 100.0, doing="step")
    assert all(poll.timeout_s is not None for poll in rig.transport.polls)
    assert max(poll.timeout_s or 0.0 for poll in rig.transport.polls) == WARN_EVERY_S


# -- the pivot ------------------------------------------------------------------------------------


def test_the_pivot_is_waited_for_alone_at_first_and_not_for_long() -> None:
    rig = Rig(3, has_block=False).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=NARROW_S / 4)
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=NARROW_S / 2)
    rig.transport.reply(2, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=NARROW_S * 3)
    pivot = rig.slot(1).host_id
    del rig.transport.polls[:]
    began = rig.clock()
    rig.engine.wait_until(
        lambda: all(map(rig.has_arrived, range(len(rig.supervisor.envs)))),
        pivot=lambda: pivot,
        doing="step",
    )
    assert rig.clock() == began + NARROW_S * 3
    first, *others = rig.transport.polls
    assert first.pivot == pivot
    assert first.timeout_s == pytest.approx(NARROW_S)
    assert others[-1].pivot is None


def test_a_death_ends_the_wait_for_a_pivot() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    rig.transport.die(0, after_s=NARROW_S / 2)
    seen: list[float] = []
    began = rig.clock()

    def finished() -> bool:
        if rig.slot(0).timestep is not None:
            seen.append(rig.clock() - began)
        return bool(seen)

    rig.engine.wait_until(finished, pivot=lambda: rig.slot(1).host_id, doing="step")
    assert seen == [pytest.approx(NARROW_S / 2)]


def test_a_pivot_without_host_is_none() -> None:
    rig = Rig().launch()
    rig.engine.wait_until(never, pivot=lambda: None, deadline=rig.clock() + 1.0, doing="step")
    assert {poll.pivot for poll in rig.transport.polls} == {None}


def test_limits_are_kept_while_a_pivot_is_waited_for() -> None:
    rig = Rig(2, deadlines=Deadlines(step_s=NARROW_S / 2)).launch()
    rig.send(0)
    rig.clock.advance(NARROW_S / 4)
    rig.send(1)
    began = rig.clock()
    rig.engine.wait_until(
        lambda: rig.slot(0).timestep is not None, pivot=lambda: rig.slot(1).host_id, doing="step"
    )
    assert rig.clock() - began == pytest.approx(NARROW_S / 4)


# -- warnings -------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "has been waiting" in r.getMessage()]


def test_a_long_wait_warns_every_thirty_seconds_and_names_the_envs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(4).launch()
    rig.send({0: 1, 2: 1})
    rig.reset(3)
    rig.engine.wait_for(never, 29.0)
    assert warnings_of(caplog) == []
    rig.engine.wait_until(never, deadline=rig.clock() + 95.0, doing="step")
    found = warnings_of(caplog)
    assert len(found) == 3
    assert found[0].startswith(
        "step has been waiting for 30 s: env 3 has been in reset; envs 0, 2 have been in step."
    )
    assert "envmgr dump" not in found[0], "there is no board that it could show"
    assert "Ctrl-C or close() ends it" in found[0]
    assert [text.partition(": ")[0].rpartition(" for ")[2] for text in found] == [
        *("30 s", "60 s", "90 s"),
    ]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_a_long_wait_names_kill_where_ctrl_c_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig().launch()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rig.engine.wait_for(never, 31.0)
    finally:
        signal.signal(signal.SIGINT, before)
    (text,) = warnings_of(caplog)
    assert text.endswith(f"`kill {os.getpid()}` or close() ends it.")


def test_a_wait_for_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig().launch()
    rig.engine.wait_for(never, 31.0)
    assert "nothing is busy" in warnings_of(caplog)[0]


def test_many_arrivals_do_not_put_a_warning_off(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})

    def finished() -> bool:
        if rig.has_arrived(1):
            rig.deliver(1)
            rig.send(1)
        if rig.slot(1).timestep is None and rig.transport.next_event is None:
            rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=0.5)
        return False

    rig.engine.wait_until(finished, deadline=rig.clock() + 61.0, doing="step")
    assert len(warnings_of(caplog)) == 2


# -- closing --------------------------------------------------------------------------------------


def test_closing_ends_a_wait_from_elsewhere() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    began = rig.clock()
    rig.transport.call_after(7.0, lambda: rig.engine.close(1.5))
    with (
        pytest.raises(ManagerClosedError, match="closed by another thread"),
        rig.engine.calling,
    ):
        rig.engine.wait_until(never, doing="step")
    assert rig.clock() == began + 7.0
    assert rig.transport.closed_with_s == 1.5
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 2
    assert rig.supervisor.statistics.cancelled == 2


def test_what_arrived_in_the_moment_of_closing_is_not_applied_any_more() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1):  # read by the poll in which a signal handler closes the manager
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=1.0)
    rig.transport.call_after(1.0, lambda: rig.engine.close(0.0))
    with pytest.raises(ManagerClosedError):
        rig.engine.wait_until(never, doing="step")
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 2
    assert rig.identity_holds()


def test_closing_between_two_arrivals_leaves_the_second_one_alone() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1):
        rig.transport.fail(env_id)
    handle = rig.supervisor.handle

    def handle_and_close(host_id: int, arrival: Any) -> None:
        handle(host_id, arrival)
        rig.engine.close(0.0)

    rig.supervisor.handle = handle_and_close  # type: ignore[method-assign]
    with pytest.raises(ManagerClosedError):
        rig.engine.wait_until(never, doing="step")
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 2


def test_a_closed_engine_refuses_calls() -> None:
    rig = Rig().launch()
    rig.engine.close(0.0)
    with pytest.raises(ManagerClosedError, match="call launch"), rig.engine.calling:
        pytest.fail("it was let in")


def test_closing_twice_closes_once() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.engine.close(3.0)
    rig.engine.close(0.0)
    assert rig.transport.closed_with_s == 3.0
    assert rig.supervisor.statistics.cancelled == 1


def test_closing_wakes_a_poll_that_waits() -> None:
    rig = Rig().launch()
    rig.engine.close(0.0)
    began = rig.clock()
    rig.transport.poll(10.0)
    assert not rig.transport.arrivals
    assert rig.clock() == began


# -- one caller at a time, one process ------------------------------------------------------------


def test_a_call_inside_of_a_call_is_refused() -> None:
    rig = Rig().launch()
    with rig.engine.calling as supervisor:
        assert supervisor is rig.supervisor
        with pytest.raises(ConcurrentCallError, match="one thread at a time"), rig.engine.calling:
            pytest.fail("it was let in")
    with rig.engine.calling:
        pass


def test_a_call_that_raises_lets_the_next_one_in() -> None:
    rig = Rig().launch()
    with pytest.raises(KeyError), rig.engine.calling:
        raise KeyError
    with rig.engine.calling:
        pass


def test_a_refused_call_leaves_the_engine_free() -> None:
    rig = Rig().launch()
    with rig.engine.calling, pytest.raises(ConcurrentCallError), rig.engine.calling:
        pass
    with rig.engine.calling:
        pass


def test_a_call_that_waited_for_the_background_of_a_closed_engine_keeps_no_lock() -> None:
    rig = Rig().launch()
    rig.engine.closing = True
    with pytest.raises(ManagerClosedError):
        rig.engine.calling._await_background()
    assert not rig.engine.calling._lock._is_owned()  # type: ignore[attr-defined]


def test_a_call_that_is_refused_beside_another_keeps_no_lock() -> None:
    calling = Rig().launch().engine.calling
    assert calling._lock.acquire(blocking=False)
    with pytest.raises(ConcurrentCallError):
        calling._refuse_beside(sys._getframe())
    assert not calling._lock._is_owned()  # type: ignore[attr-defined]


def test_a_fork_is_refused_and_its_close_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_engines", weakref.WeakSet())  # none of other tests
    rig = Rig().launch()
    engine_module.refuse_in_fork()
    with pytest.raises(ManagerClosedError, match="fork of the one"), rig.engine.calling:
        pytest.fail("it was let in")
    rig.engine.close(0.0)
    assert rig.transport.closed_with_s is None
    later = Rig().launch()  # one that is made in the fork belongs to it
    with later.engine.calling:
        pass


# -- interrupts -----------------------------------------------------------------------------------


def test_hosts_need_not_ring_when_nobody_waits() -> None:
    rig = Rig(has_block=True).launch()
    assert rig.transport.shared is not None
    block = rig.transport.shared.block
    assert block is not None
    for finished in (True, False):
        rig.engine.wait_until(lambda: finished, deadline=rig.clock(), doing="this")  # noqa: B023
        assert block.sleeping[-1] == 0


def test_a_closed_engine_holds_no_part_of_the_block() -> None:
    rig = Rig(40, has_block=True).launch()
    rig.send(dict.fromkeys(range(40), 1))
    for first in range(40):
        for end in range(first + 1, 40):
            rig.selection(range(first, end))  # more than are remembered
    rig.engine.close(0.0)
    # What else is alive may be a proxy that answers isinstance with a warning.
    held = [it for it in gc.get_objects() if type(it) is Window and len(it.tokens) == 40]
    assert not held


# -- the background, without a thread -------------------------------------------------------------


class StillThread:
    """A thread that never runs; the test does its work."""

    started = 0

    def __init__(self, **options: Any) -> None:
        self.options = options

    def start(self) -> None:
        StillThread.started += 1

    def is_alive(self) -> bool:
        return False


class Behind:
    """An engine with a background whose thread is played by the test.

    `waited` holds how long it meant to sleep each time; the clock moves on as if it had.
    """

    def __init__(self, rig: Rig, patch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.waited: list[float | None] = []
        StillThread.started = 0
        patch.setattr(engine_module.threading, "Thread", StillThread)
        patch.setattr(engine_module, "wait", self._wait)
        self.engine = Engine(rig.supervisor, rig.transport, rig.clock, background=True)
        rig.engine = self.engine
        background = self.engine._background
        assert background is not None
        self.background = background

    def _wait(self, objects: Any, timeout_s: float | None) -> list[Any]:
        self.waited.append(timeout_s)
        if timeout_s is not None:
            self.rig.clock.advance(timeout_s)
        return []

    @property
    def is_armed(self) -> bool:
        return not self.background.dormant

    def call(self) -> None:
        """Make a public call that does nothing."""
        with self.engine.calling:
            pass

    def carry_on(self, seconds: float) -> None:
        """Do what the thread does for a while, or until it goes to sleep."""
        end = self.rig.clock() + seconds
        while self.rig.clock() < end and self.background._carry_on():
            pass


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def behind(patch: pytest.MonkeyPatch, **options: Any) -> Behind:
    return Behind(Rig(2, **options).launch(), patch)


def test_the_background_is_armed_by_work_and_by_nothing_else(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched)
    it.call()
    assert StillThread.started == 0
    assert not it.is_armed
    it.rig.reset()
    it.call()
    assert StillThread.started == 1
    assert it.is_armed
    it.rig.transport.reply(0, Op.RESET_DONE, ("first", {}))
    it.carry_on(10.0)
    assert not it.is_armed
    assert it.rig.ready() == [0, 1]
    it.rig.reset()
    it.call()
    assert StillThread.started == 1  # the same thread
    assert it.is_armed
    it.engine.close(0.0)


def test_a_call_that_gets_no_memory_says_what_can_be_done_and_gives_back_what_it_had() -> None:
    rig = Rig(1).launch()
    rig.send(0)
    rig.stepped(0)
    taken = rig.supervisor.collector.take(rig.selection([0]))
    assert taken is not None

    def call() -> None:
        with rig.engine.calling as supervisor:
            supervisor.collector.timesteps(taken)
            raise MemoryError

    with pytest.raises(OutOfMemoryError, match=r"RLIMIT_AS(.|\n)*recv\(\)(.|\n)*\(MemoryError\)"):
        call()
    assert list(rig.deliver(0)) == [0]
    rig.engine.close(0.0)


def test_what_an_interrupted_call_has_left_is_for_the_next_call(
    patched: pytest.MonkeyPatch,
) -> None:
    it = behind(patched)
    it.rig.reset()
    it.call()
    journal = it.rig.supervisor.journal
    journal.caller = sys._getframe()  # of a call that could not make up for its interrupt
    it.rig.transport.reply(0, Op.RESET_DONE, ("first", {}))
    it.carry_on(10.0)
    assert not it.is_armed
    assert it.rig.ready() == [1]
    journal.caller = None
    it.call()
    assert it.is_armed
    it.carry_on(10.0)
    assert it.rig.ready() == [0, 1]
    it.engine.close(0.0)


def test_resets_retries_and_renewals_go_on_behind_the_caller(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched, policy=FailurePolicy(max_retry=2, retry_waiting_s=0.5))
    rig = it.rig
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("terminal", 1.0, True, {}, AfterStep.RESETS))
    rig.transport.fail(0, "reset", after_s=1.0)
    rig.reset(1)
    rig.transport.die(1, after_s=1.0)
    it.call()
    it.carry_on(1.2)
    rig.transport.answer = FakeEnvs(seconds={Op.HELLO: 1.0, Op.RESET: 1.0})
    rig.transport.reply(1, Op.HELLO, rig.transport.host_of(1).description)
    it.carry_on(10.0)
    assert rig.ready() == [1]  # the timestep of 0 has not been delivered yet
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == [0, 1]
    assert rig.supervisor.statistics.reset_retries == 1
    assert rig.slot(1).generation == 1
    it.engine.close(0.0)


def test_limits_pass_behind_the_caller(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched, deadlines=Deadlines(step_s=2.0))
    it.rig.send(0)
    it.call()
    assert it.is_armed
    began = it.rig.clock()
    while it.rig.slot().timestep is None:
        it.background._carry_on()
    assert it.rig.clock() - began == pytest.approx(2.0, abs=LOOK_EVERY_S)
    assert it.rig.clock() - began >= 2.0
    it.engine.close(0.0)


def test_the_background_looks_seldom_when_nothing_changes(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched)
    it.rig.send(0)
    it.call()
    it.carry_on(60.0)
    seconds = [s for s in it.waited if s is not None]
    assert max(seconds) <= LOOK_EVERY_S
    assert len(seconds) < 60.0 / LOOK_EVERY_S + 20
    it.engine.close(0.0)


def test_the_background_leaves_the_lock_to_the_caller(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched)
    it.rig.reset()
    it.call()

    class Taken:
        def acquire(self, blocking: bool = True) -> bool:
            assert not blocking
            return False

    real, it.background._lock = it.background._lock, Taken()  # type: ignore[assignment]
    polls = len(it.rig.transport.polls)
    assert not it.background._carry_on()
    assert it.background.dormant, "the caller tells it of what is left when it leaves"
    assert len(it.rig.transport.polls) == polls
    it.background._lock = real
    it.engine.close(0.0)


def test_a_death_during_a_call_is_left_to_the_caller_and_looked_for_again(
    patched: pytest.MonkeyPatch,
) -> None:
    it = behind(patched)
    it.call()
    background = it.background
    patched.setattr(background, "_wait", lambda objects, timeout_s: bool(objects))
    patched.setattr(it.rig.transport, "any_death", lambda: [object()])
    assert background._stand_back() is True
    background._ending = True  # the call closes the manager, and waits for this thread
    assert background._stand_back() is False
    it.engine.close(0.0)


def test_the_background_sleeps_when_there_is_nothing_to_do(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched)
    it.call()
    background, waits = it.background, iter((None, None, None))
    slept: list[float | None] = []

    def wait(objects: Any, timeout_s: float | None) -> None:
        slept.append(timeout_s)
        background._ending = len(slept) == 3

    patched.setattr(background, "_wait", wait)
    patched.setattr(background, "_carry_on", lambda: next(waits))  # StopIteration: it does not
    background._run()
    assert slept == [None] * 3
    it.engine.close(0.0)


def test_a_defect_in_the_background_surfaces_from_the_next_call(
    patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = behind(patched)
    it.rig.reset(params={})  # by message
    it.call()

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("a defect")

    it.rig.supervisor.handle = fail  # type: ignore[method-assign]
    it.rig.transport.reply(0, Op.RESET_DONE, ("first", {}))
    assert not it.background._carry_on()
    assert isinstance(it.rig.supervisor.repair.fatal, ZeroDivisionError)
    assert "the background thread of a manager failed" in caplog.text
    it.engine.close(0.0)


def test_what_the_background_has_no_memory_for_is_done_by_the_next_call(
    patched: pytest.MonkeyPatch,
) -> None:
    it = behind(patched)
    it.rig.reset(params={})  # by message
    it.call()
    handle = it.rig.supervisor.handle

    def fail(*args: Any) -> None:
        raise NoMemoryYet

    it.rig.supervisor.handle = fail
    it.rig.transport.reply(0, Op.RESET_DONE, ("first", {}))
    assert not it.background._carry_on()
    it.rig.supervisor.handle = handle
    with it.engine.calling:
        it.engine.collect()
    assert it.rig.supervisor.repair.fatal is None
    assert it.rig.supervisor.states[0] is EnvState.RUN
    it.engine.close(0.0)


def test_the_background_ends_with_the_engine(patched: pytest.MonkeyPatch) -> None:
    it = behind(patched)
    it.rig.reset()
    it.call()
    it.engine.close(0.0)
    polls = len(it.rig.transport.polls)
    assert not it.background._carry_on()
    it.background._run()  # ends at once
    assert len(it.rig.transport.polls) == polls
    it.engine.close(0.0)


def test_seconds_until_a_moment() -> None:
    rig = Rig().launch()
    assert rig.engine.seconds_until(math.inf) is None
    assert rig.engine.seconds_until(rig.clock() + 2.0) == 2.0
    assert rig.engine.seconds_until(rig.clock() - 2.0) == 0.0


def test_without_background_nothing_is_started() -> None:
    before = threading.active_count()
    rig = Rig().launch()
    rig.reset()
    with rig.engine.calling:
        pass
    assert threading.active_count() == before


INF = float("inf")


def outstanding(after_s: Mapping[int, float], *, done: tuple[int, ...] = (), **options: Any) -> Rig:
    """Return a rig whose envs have actions under way.

    Args:
        after_s: when the timestep of each env comes; None of an env: never.
        done: envs whose timestep ends the episode.
        **options: of the rig.
    """
    rig = Rig(len(after_s), **options).launch()
    rig.send(dict.fromkeys(after_s, 1))
    for env_id, seconds in after_s.items():
        if seconds < INF:
            after = AfterStep.RESETS if env_id in done else AfterStep.NOTHING
            payload = (f"next of {env_id}", 1.0, env_id in done, {}, after)
            rig.transport.reply(env_id, Op.STEPPED, payload, after_s=seconds)
    return rig


def some(rig: Rig, wait_num: float, timeout_s: float = 0.0, **how: Any) -> tuple[list[int], float]:
    """Gather, deliver, and return the env_ids delivered with the seconds that it took."""
    began = rig.clock()
    gathered = rig.gather.some(GatherPolicy(wait_num, timeout_s), **how)
    took = rig.clock() - began
    return list(rig.hand_out(gathered)), took


# -- gathering: exactly these ---------------------------------------------------------------------


def test_all_that_were_asked_for_are_awaited_and_returned_in_their_order() -> None:
    rig = outstanding({0: 3.0, 1: 1.0, 2: 2.0})
    began = rig.clock()
    assert list(rig.exactly(2, 0, 1)) == [2, 0, 1]
    assert rig.clock() == began + 3.0


def test_others_are_not_awaited() -> None:
    rig = outstanding({0: INF, 1: 1.0})
    assert list(rig.exactly(1)) == [1]
    assert rig.deliver() == {}


def test_what_is_there_already_is_not_awaited() -> None:
    rig = outstanding({0: 0.0, 1: 0.0})
    rig.pump()
    polls = len(rig.transport.polls)
    rig.exactly(0, 1)
    assert len(rig.transport.polls) == polls


def test_the_pivot_is_one_of_those_that_are_missing() -> None:
    after_s = {env_id: NARROW_S * (env_id + 1) / 5 for env_id in range(4)}
    rig = outstanding(after_s, has_block=False)
    del rig.transport.polls[:]
    rig.gather.exactly(rig.selection([0, 1, 2, 3]))
    hosts = [slot.host_id for slot in rig.supervisor.envs]
    assert rig.transport.polls[0].pivot == hosts[2]
    assert all(poll.pivot in hosts[2:] for poll in rig.transport.polls)


@pytest.mark.parametrize(
    ("num_workers", "ring"), [(None, RING_LAST), (2, RING_LAST), (1, RING_ONCE)]
)
def test_one_ring_says_that_all_have_replied(num_workers: int | None, ring: int) -> None:
    rig = Rig(4, num_workers=num_workers, has_block=True).launch()
    sent = rig.send(dict.fromkeys(range(4), 1), ring)
    for env_id in range(4):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=env_id + 1.0)
    rings = rig.transport.rings
    began = rig.clock()
    assert isinstance(sent, Selection)
    assert list(rig.hand_out(rig.gather.exactly(sent))) == [0, 1, 2, 3]
    assert (rig.clock() - began, rig.transport.rings - rings) == (4.0, 1)


def test_hosts_that_need_not_ring_are_asked_to_when_some_of_all_are_awaited() -> None:
    rig = Rig(3, has_block=True).launch()
    rig.send(dict.fromkeys(range(3), 1), RING_LAST)
    for env_id in range(3):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=env_id + 1.0)
    assert some(rig, 1) == ([0], 1.0)
    assert some(rig, 2) == ([1, 2], 2.0)


def test_an_env_that_fails_is_no_longer_missing() -> None:
    rig = outstanding({0: 5.0, 1: INF, 2: INF}, deadlines=Deadlines(step_s=8.0))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    delivered = rig.exactly(0, 1, 2)
    assert rig.clock() == began + 8.0
    assert ["abnormal" in delivered[i].info for i in (0, 1, 2)] == [False, True, True]


def test_a_timestep_held_for_its_reset_is_missing_still() -> None:
    rig = outstanding({0: 1.0}, done=(0,), reset_inplace=True)
    began = rig.clock()
    rig.transport.call_after(2.0, lambda: rig.transport.reply(0, Op.RESET_DONE, ("first", {})))
    assert rig.exactly(0)[0].obs == "next of 0"
    assert rig.clock() == began + 2.0
    assert rig.ready() == [0]


def test_a_failure_that_is_to_be_raised_at_once_ends_the_wait() -> None:
    rig = outstanding({0: 100.0, 1: INF}, policy=FailurePolicy(recover=False))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    rig.exactly(0, 1)
    assert rig.clock() == began + 1.0
    assert rig.supervisor.repair.urgent


# -- gathering: some of them ----------------------------------------------------------------------


def test_a_gather_that_does_not_wait_takes_what_has_come_by_message() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    odd = {"list": [1]}  # goes by message in any case
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, odd, AfterStep.NOTHING))
    assert some(rig, 1, deadline=rig.clock(), exactly=True) == ([0], 0.0)


@pytest.mark.parametrize(
    ("wait_num", "found", "took"),
    [(1, [2], 1.0), (2, [1, 2], 2.0), (3, [1, 2, 3], 3.0), (4, [0, 1, 2, 3], 4.0),
     (9, [0, 1, 2, 3], 4.0), (INF, [0, 1, 2, 3], 4.0)],
)  # fmt: skip
def test_as_many_as_wanted_in_ascending_order(
    wait_num: float, found: list[int], took: float
) -> None:
    rig = outstanding({0: 4.0, 1: 2.0, 2: 1.0, 3: 3.0})
    assert some(rig, wait_num) == (found, took)


def test_all_that_arrived_together_are_returned_together() -> None:
    rig = outstanding({0: 1.0, 1: 1.0, 2: 2.0})
    assert some(rig, 1) == ([0, 1], 1.0)
    assert some(rig, 1) == ([2], 1.0)


def test_what_has_arrived_before_counts_and_is_collected_first() -> None:
    rig = outstanding({0: 0.0, 1: 0.5, 2: 5.0})
    rig.clock.advance(1.0)
    assert some(rig, 1) == ([0, 1], 0.0)


def test_earlier_sends_are_outstanding_too() -> None:
    rig = outstanding({0: 4.0, 1: 1.0})
    assert some(rig, 1) == ([1], 1.0)
    rig.send(1)
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=10.0)
    assert some(rig, 1) == ([0], 3.0)
    assert some(rig, 1) == ([1], 7.0)


def test_nothing_outstanding_is_an_error_that_names_send() -> None:
    rig = Rig(2).launch()
    with pytest.raises(NothingReadyError, match=r"send actions first"):
        rig.gather.some(GatherPolicy(1))


def test_fewer_outstanding_than_wanted_are_awaited_all() -> None:
    rig = Rig(3).launch()
    rig.send(1)
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=2.0)
    assert some(rig, 2) == ([1], 2.0)


# -- gathering: stragglers ------------------------------------------------------------------------


def test_stragglers_are_awaited_for_so_long_after_enough_have_come() -> None:
    rig = outstanding({0: 4.0, 1: 1.0, 2: 1.5, 3: 2.5})
    assert some(rig, 1, timeout_s=1.0) == ([1, 2], 2.0)


def test_a_straggler_at_the_very_end_of_the_wait_is_taken() -> None:
    rig = outstanding({0: 4.0, 1: 1.0, 2: 2.0})
    assert some(rig, 1, timeout_s=1.0) == ([1, 2], 2.0)


def test_the_wait_for_stragglers_ends_when_there_are_none() -> None:
    rig = outstanding({0: 1.0, 1: 1.5})
    assert some(rig, 1, timeout_s=60.0) == ([0, 1], 1.5)


def test_a_long_wait_for_enough_is_not_shortened() -> None:
    rig = outstanding({0: 100.0, 1: 50.0})
    assert some(rig, 2, timeout_s=0.5) == ([0, 1], 100.0)


def test_gathering_all_has_no_stragglers() -> None:
    rig = outstanding({0: 1.0, 1: 2.0})
    assert some(rig, INF, timeout_s=60.0) == ([0, 1], 2.0)


# -- gathering: ends of episodes ------------------------------------------------------------------


def test_it_goes_on_until_there_is_something_to_step_next() -> None:
    rig = outstanding({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, done=(0, 1))
    assert some(rig, 1) == ([0, 1, 2], 3.0)


def test_it_stops_when_nothing_more_is_outstanding() -> None:
    rig = outstanding({0: 1.0, 1: 2.0}, done=(0, 1))
    assert some(rig, 1) == ([0, 1], 2.0)


def test_abnormal_timesteps_are_ends_of_episodes() -> None:
    rig = outstanding({0: INF, 1: 2.0, 2: 9.0})
    rig.transport.die(0, after_s=1.0)
    assert some(rig, 1) == ([0, 1], 2.0)


def test_a_number_that_was_asked_for_is_kept_to_exactly() -> None:
    rig = outstanding({0: 1.0, 1: 2.0, 2: 3.0}, done=(0,))
    assert some(rig, 1, exactly=True) == ([0], 1.0)


def test_held_timesteps_do_not_count() -> None:
    rig = outstanding({0: 1.0, 1: 3.0}, done=(0,), reset_inplace=True)
    assert some(rig, 1, exactly=True) == ([1], 3.0)
    rig.transport.reply(0, Op.RESET_DONE, ("first", {}), after_s=1.0)
    assert some(rig, 1, exactly=True) == ([0], 1.0)


# -- gathering: deadlines -------------------------------------------------------------------------


def test_at_the_deadline_it_returns_what_has_arrived() -> None:
    rig = outstanding({0: 1.0, 1: 3.0, 2: 9.0})
    assert some(rig, 3, deadline=rig.clock() + 4.0) == ([0, 1], 4.0)


def test_possibly_nothing() -> None:
    rig = outstanding({0: 9.0})
    assert some(rig, 1, deadline=rig.clock() + 2.0) == ([], 2.0)
    assert rig.supervisor.table.owed_ids() == [0]
    assert some(rig, 1) == ([0], 7.0)


def test_a_deadline_of_now_looks_once() -> None:
    rig = outstanding({0: 0.0, 1: 1.0})
    assert some(rig, 2, deadline=rig.clock()) == ([0], 0.0)


def test_the_wait_for_stragglers_ends_at_the_deadline_too() -> None:
    rig = outstanding({0: 1.0, 1: 9.0})
    assert some(rig, 1, timeout_s=5.0, deadline=rig.clock() + 2.0) == ([0], 2.0)


def test_a_reply_at_the_very_deadline_is_taken() -> None:
    rig = outstanding({0: 2.0, 1: 9.0})
    assert some(rig, 2, deadline=rig.clock() + 2.0) == ([0], 2.0)


# -- gathering: urgent failures -------------------------------------------------------------------


def test_an_urgent_failure_ends_it_whatever_is_missing() -> None:
    rig = outstanding({0: 100.0, 1: INF}, policy=FailurePolicy(recover=False))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    rig.gather.some(GatherPolicy(2))
    assert rig.clock() == began + 1.0


def test_an_exhausted_budget_is_no_reason_to_return_early() -> None:
    rig = outstanding({0: 4.0, 1: INF}, policy=FailurePolicy(max_failures=0))
    rig.transport.die(1, after_s=1.0)
    assert some(rig, 2) == ([0, 1], 4.0)
    assert rig.supervisor.repair.fatal is not None


def test_what_is_wanted_as_arrays_is_taken_so_whether_all_or_some_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, taken = outstanding({0: 1.0, 1: 2.0, 2: 2.0}), []
    collector = rig.supervisor.collector

    def take_arrays(selection: Any) -> Any:
        taken.append(selection.ids)
        return collector.take(selection)

    monkeypatch.setattr(collector, "take_arrays", take_arrays)
    assert some(rig, 1, as_arrays=True) == ([0], 1.0)
    rig.hand_out(rig.gather.exactly(rig.selection([1, 2]), as_arrays=True))
    assert taken == [[0], [1, 2]]


# -- rows of batched envs -------------------------------------------------------------------------


def test_a_gather_of_some_goes_on_until_one_can_be_stepped() -> None:
    rig = rows_of_batches((Batch(0, 2, False), Batch(2, 2, False)), 4)
    rig.send({i: i for i in range(4)})
    rig.stepped(0)
    rig.fail(1, kind=FailureKind.PROTOCOL)  # its reset keeps env 0 from being ready
    rig.transport.reply(2, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING), after_s=1.0)
    rig.transport.reply(3, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING), after_s=2.0)
    found = rig.hand_out(rig.gather.some(GatherPolicy(1, 0.0), deadline=float("inf")))
    assert [*found] == [0, 1, 2, 3]
    assert rig.ready() == [2, 3]


def test_waiting_for_rows_ends_when_all_are_ready() -> None:
    rig = rows_of_batches(answer=FakeEnvs(seconds={Op.RESET: 1.0}))
    rig.reset(1)
    record = rig.supervisor.table
    assert [record.is_coming(i) for i in range(3)] == [True, True, True]
    rig.run(2.0)
    assert record.is_ready(0)
    rig.transport.answer = None
    rig.send({i: i for i in range(3)})
    rig.fail(0, kind=FailureKind.PROTOCOL)
    assert [record.is_coming(i) for i in range(3)] == [True, False, False]


@pytest.mark.parametrize("rest", ["leased", "done", "failed", "owed", "ended"])
@pytest.mark.parametrize("state", [EnvState.RUN, EnvState.NEED_RESET, EnvState.RESET])
def test_nobody_waits_for_leased_envs_or_takes_them_for_his(rest: str, state: EnvState) -> None:
    policy = FailurePolicy(max_failures=0)
    options = {"episode_num": 1} if rest == "done" else {"auto_reset": False}
    rig = Rig(2, policy=policy, **options).launch()
    supervisor, table = rig.supervisor, rig.supervisor.table
    if state is EnvState.NEED_RESET:
        rig.send(0)
        rig.stepped(0, done=True)
        rig.deliver(0)
    rig.send(1)
    if rest == "failed":
        rig.fail(1)
    elif rest != "owed":
        rig.stepped(1, done=True)
    if rest != "owed":
        rig.deliver(1)
        supervisor.repair.take_fatal()
    table.lease(0)
    if rest == "leased":
        table.lease(1)
    if state is EnvState.RESET:
        rig.reset(0)
    reasons = {
        "leased": r"envs \[0, 1\] are leased\. Calls",
        "owed": r"envs \[1\] have actions under way",
        "ended": r"the episodes of envs \[1\] have ended",
    }
    reason = reasons.get(rest, r"envs \[0\] are leased, and the others take no action")
    with pytest.raises(NothingReadyError, match=reason):
        await_one_ready(rig.engine, supervisor)
    table.unlease(0)
    if rest in {"done", "failed"} and state is EnvState.RUN:
        assert await_one_ready(rig.engine, supervisor)


def test_who_waits_for_it_is_told_that_others_have_to_be_stepped() -> None:
    rig = rows_reset_in_next_step()
    assert not rig.supervisor.table.is_coming(0)
    await_all_ready(rig.engine, rig.supervisor, [0, 1])
    with pytest.raises(NothingReadyError, match=r"envs \[0\] begin with the next step"):
        refuse_unready(rig.supervisor, [0, 1])
