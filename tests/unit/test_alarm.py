"""The alarm that bounds env code in the caller's thread."""

from __future__ import annotations

import ctypes
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from envmgr.transport.alarm import Alarm

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)  # that of the test runner
    yield
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def own(signum: int, frame: Any) -> None:
    """A handler of the user's own."""


def idle() -> None:
    """Code that takes no time."""


def interrupt() -> None:
    raise KeyboardInterrupt


def at_call_of_signal(patch: pytest.MonkeyPatch, at: int, strike: Callable[[], None]) -> None:
    """Have `strike` called just before a call of `signal.signal` or `signal.setitimer`."""
    calls = 0

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                strike()
            return function(*args)

        return call

    patch.setattr(signal, "signal", before(signal.signal))
    patch.setattr(signal, "setitimer", before(signal.setitimer))


def wait_for_alarm() -> None:
    while True:  # not `signal.pause`, which an alarm just before it does not end
        pass


def test_code_that_takes_too_long_is_ended_and_all_is_as_before() -> None:
    signal.signal(signal.SIGALRM, own)
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 5.0)
    alarm = Alarm()
    alarm.bound(0.001, wait_for_alarm)
    assert alarm.before is None
    assert signal.getsignal(signal.SIGALRM) is own
    remaining_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert 0.0 < remaining_s < 1000.0
    assert interval_s == 5.0


def test_no_time_at_all_is_a_limit_too() -> None:
    alarm = Alarm()
    alarm.bound(0.0, wait_for_alarm)
    assert "wait_for_alarm" in alarm.where


def test_the_users_own_alarm_comes_through() -> None:
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    Alarm().bound(1000.0, lambda: signal.raise_signal(signal.SIGALRM))
    assert seen == [1]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_an_alarm_of_somebody_else_is_not_the_limit(handler: Any) -> None:
    signal.signal(signal.SIGALRM, handler)
    alarm = Alarm()
    assert not alarm.bound(1000.0, lambda: signal.raise_signal(signal.SIGALRM))
    assert alarm.where == ""


def test_a_handler_and_a_timer_that_the_code_has_set_stay() -> None:
    def build() -> None:
        signal.signal(signal.SIGALRM, own)
        signal.setitimer(signal.ITIMER_REAL, 500.0, 5.0)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    alarm = Alarm()
    assert not alarm.bound(2000.0, build)
    assert alarm.before is None
    assert signal.getsignal(signal.SIGALRM) is own
    remaining_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert 0.0 < remaining_s <= 500.0
    assert interval_s == 5.0


def test_a_handler_alone_stays_and_is_not_rung_by_the_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    Alarm().bound(1000.0, lambda: signal.signal(signal.SIGALRM, own))
    assert signal.getsignal(signal.SIGALRM) is own
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_timer_that_the_code_ends_has_ended() -> None:
    signal.signal(signal.SIGALRM, own)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    Alarm().bound(2000.0, lambda: signal.alarm(0))
    assert signal.getsignal(signal.SIGALRM) is own
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_code_that_puts_back_the_alarms_own_handler_later_leaves_none() -> None:
    found = []
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    alarm = Alarm()
    alarm.bound(1000.0, lambda: found.append(signal.signal(signal.SIGALRM, own)))
    signal.signal(signal.SIGALRM, found[0])
    alarm.bound(1000.0, lambda: signal.raise_signal(signal.SIGALRM))
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.parametrize("at", range(1, 6), ids="call {}".format)
def test_what_an_interrupt_keeps_from_being_put_back_is_put_back_later(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    signal.signal(signal.SIGALRM, own)
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 5.0)
    alarm = Alarm()
    with monkeypatch.context() as patch:
        at_call_of_signal(patch, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            alarm.bound(2000.0, idle)
    alarm.restore()
    assert signal.getsignal(signal.SIGALRM) is own
    remaining_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert 0.0 < remaining_s <= 1000.0
    assert interval_s == 5.0
    assert alarm.before is None


@pytest.mark.parametrize("code", [idle, interrupt])
@pytest.mark.parametrize("at", range(2, 6), ids="call {}".format)
def test_an_alarm_that_rings_while_it_is_set_or_put_back_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, at: int, code: Callable[[], None]
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    alarm = Alarm()

    def ring() -> None:
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # as no timer of ours does then
            assert alarm.before is not None
            alarm.before = alarm.before._replace(began=-math.inf)
            signal.raise_signal(signal.SIGALRM)

    with monkeypatch.context() as patch:
        at_call_of_signal(patch, at, ring)
        if code is interrupt and at > 2:
            with pytest.raises(KeyboardInterrupt):
                alarm.bound(1000.0, code)
        else:
            alarm.bound(1000.0, code)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert alarm.before is None


def test_an_alarm_that_rings_just_before_the_code_sleeps_ends_it_all_the_same() -> None:
    signal.signal(signal.SIGALRM, own)
    sleep = ctypes.CDLL(None).sleep
    # Between the two Python does not look whether there was a signal.
    Alarm().bound(0.01, lambda: list(map(sleep, (100, 100))))


def slow() -> None:
    time.sleep(100.0)


def test_what_is_interrupted_is_known_by_its_stack() -> None:
    signal.signal(signal.SIGALRM, own)
    alarm = Alarm()
    alarm.bound(1.0, slow)
    assert "in slow" in alarm.where
    said = alarm.where.rstrip("~^ \n")  # Python 3.13 marks the call in a line below it
    assert said.endswith("time.sleep(100.0)")
    assert __file__ in alarm.where.splitlines()[0], "nothing of envmgr comes before it"
    alarm.bound(1000.0, idle)
    assert alarm.where == ""
