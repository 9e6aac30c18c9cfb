from __future__ import annotations

import signal
import threading

import pytest

from envmgr import __main__ as command
from envmgr.cli.exit_codes import INTERRUPTED
from envmgr.cli.interrupt import Interruption


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stall of the machine is taken for a signal that goes unnoticed."""
    monkeypatch.setattr("envmgr.cli.interrupt.PATIENCE_S", 1000.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_only_asks(number: signal.Signals) -> None:
    with Interruption() as interruption:
        assert not interruption.requested
        signal.raise_signal(number)
        assert interruption.requested
        expected = "Ctrl-C" if number == signal.SIGINT else number.name
        assert interruption.name == expected
        signal.raise_signal(signal.SIGINT)  # a second one is harmless
        assert interruption.name == expected


def test_what_goes_unnoticed_interrupts() -> None:
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption._lose_patience()  # what the timer does


def test_a_wait_in_the_kernel_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmgr.cli.interrupt.PATIENCE_S", 0.01)

    def ask_and_wait() -> None:
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(20)  # on a busy machine the interrupt may come before this

    with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
        ask_and_wait()
    assert interruption.name == "SIGTERM"


def test_nothing_interrupts_once_it_is_acknowledged() -> None:
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        interruption.acknowledge()
        interruption._lose_patience()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_after_the_end_asks_for_nothing() -> None:
    with Interruption() as interruption:
        interruption.acknowledge()
        signal.raise_signal(signal.SIGINT)
        assert not interruption.requested


def test_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interruption():
        pass
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_is_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # as nohup, and a shell's `&`, do
    try:
        with Interruption() as interruption:
            signal.raise_signal(number)
            assert not interruption.requested
    finally:
        signal.signal(number, before)


def test_other_threads_get_no_handlers() -> None:
    entered = []

    def enter() -> None:
        with Interruption() as interruption:
            entered.append(interruption.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [False]


def test_an_interrupt_of_the_import_ends_the_command_as_a_later_one_does() -> None:
    assert command._INTERRUPTED == INTERRUPTED
