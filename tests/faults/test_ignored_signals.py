"""Where signals are ignored from the start: background jobs, `nohup`, some CI runners."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import gymnasium
import pytest

from envmgr.testing.checkup.interrupting import interrupt
from tests.docs.blocks import ROOT

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture
def ignored() -> Iterator[None]:
    """Signals are ignored here, and in what is started from here."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in IGNORED]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_check_tries_ctrl_c_all_the_same(ignored: None) -> None:
    found = interrupt(partial(gymnasium.make, "CartPole-v1"), 30.0)
    assert (found.problem, found.left) == ("", 0)


def test_the_tests_hear_signals_all_the_same(ignored: None) -> None:
    """Some that raise them in themselves, in a suite that is started so."""
    suite = ("tests/unit/test_cli_interrupt.py", "tests/unit/test_alarm.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
