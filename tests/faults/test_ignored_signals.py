"""Where signals are ignored from the start: background jobs, `nohup`, some CI runners."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gymnasium
import pytest

from envmgr.testing.checkup.interrupting import interrupt
from tests.docs.blocks import ROOT

HEARD = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


@pytest.fixture
def ignored() -> Iterator[None]:
    """Signals are ignored here, and in what is started from here."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in HEARD]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_check_tries_ctrl_c_all_the_same(ignored: None) -> None:
    found = interrupt(partial(gymnasium.make, "CartPole-v1"), 30.0)
    assert (found.problem, found.left) == ("", 0)


def test_signals_are_heard() -> None:
    """Here, and in what is started from here."""
    assert not [number for number in HEARD if signal.getsignal(number) is signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = f"import signal; print([int(signal.getsignal(n) == 1) for n in {[*map(int, HEARD)]}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([0] * len(HEARD))


def test_the_tests_hear_signals_that_are_ignored_where_they_are_started(ignored: None) -> None:
    name = f"{Path(__file__).relative_to(ROOT)}::{test_signals_are_heard.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
