"""Steps that another process takes: how many they are, and the end of that process if one hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import gymnasium
import pytest

from envmgr.env import adapt
from envmgr.errors import EnvCrash
from envmgr.manager import tally as module
from envmgr.manager.tally import ATTEMPTS, EnvHang, TalliedPlay, Tally
from envmgr.tuning.measuring import measure_one
from envmgr.worker.profiling import Profile, Trial

WORKER = 123_456_789
"""The pid of the process that takes the steps; there is none."""

STACKS = 'Current thread 0x1 (most recent call first):\n  File "/e/sim.py", line 7 in step'


@pytest.fixture
def tally() -> Iterator[Tally]:
    with closing(Tally(step_s=10.0, reset_s=60.0)) as opened:
        yield opened


def crash(how: str = "exit code 7") -> EnvCrash:
    text = f"the worker of env 0 (generation 1) died during apply(random_steps): {how}"
    told = "warning: no GPU\n"  # what the env has said, which is no part of its stacks
    return EnvCrash(text, env_id=0, generation=1, during="call", stderr_tail=told)


class Worker:
    """What the process with the steps does to the tally; it dies when it is told by `kill`."""

    def __init__(self, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tally = tally
        self.killed: list[tuple[int, int]] = []
        self.is_dead = threading.Event()
        self._patch = monkeypatch
        monkeypatch.setattr(module.os, "kill", self._kill)
        monkeypatch.setattr(module.Stacks, "of", lambda _, pid: STACKS if pid == WORKER else "")
        monkeypatch.setattr(module, "_LOOKS_S", 0.001)

    def _kill(self, pid: int, number: int) -> None:
        self.killed.append((pid, number))
        self.is_dead.set()

    def takes(self, begins: Callable[[], None], pid: int = WORKER, clock: float = 0.0) -> None:
        """Begin a step or a reset at a moment of the clock; the epoch was long ago."""
        with self._patch.context() as patch:
            patch.setattr(module.os, "getpid", lambda: pid)
            patch.setattr(module.time, "monotonic", lambda: clock)
            begins()

    def hangs_in(self, begins: Callable[[], None]) -> EnvHang:
        """Hang, and return what became of that."""

        def call() -> None:
            self.takes(begins, clock=1.0)
            assert self.is_dead.wait(60.0), "nobody ended the process"
            raise crash("killed by SIGKILL")

        self.is_dead.clear()
        with pytest.raises(EnvHang) as caught:
            self.tally.watched(call)
        return caught.value


@pytest.fixture
def worker(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tally, monkeypatch)


def test_a_process_that_hangs_is_ended_and_says_where(tally: Tally, worker: Worker) -> None:
    hang = worker.hangs_in(tally.step_begins)
    assert worker.killed == [(WORKER, signal.SIGKILL)]
    assert (hang.limit_s, hang.env_id, hang.generation) == (10.0, 0, 1)
    assert hang.stacks == STACKS
    assert str(hang) == (
        "env 0 (generation 1) hung: a step of it was not over within 10 s\n\n"
        f"Where it was:\n{STACKS}"
    )
    assert tally.n == 1


def test_what_has_hung_has_less_time_from_then_on(tally: Tally, worker: Worker) -> None:
    worker.takes(tally.reset_begins, clock=5.0)
    worker.takes(tally.reset_ends, clock=5.5)
    assert worker.hangs_in(tally.step_begins).limit_s == 10.0
    assert worker.hangs_in(tally.step_begins).limit_s == 5.0  # none was over so far
    worker.takes(tally.step_begins, clock=7.0)
    worker.takes(tally.step_ends, clock=7.001)
    assert worker.hangs_in(tally.step_begins).limit_s == 2.5
    assert worker.hangs_in(tally.step_begins).limit_s == module.LEAST_LIMIT_S
    hang = worker.hangs_in(tally.reset_begins)
    assert hang.limit_s == 60.0  # another matter
    assert "a reset of it was not over within 60 s" in str(hang)
    assert worker.hangs_in(tally.reset_begins).limit_s == 25.0  # 50 times the longest


def test_what_dies_by_itself_does_not_hang(tally: Tally, worker: Worker) -> None:
    died = crash()

    def call() -> None:
        worker.takes(tally.step_begins, clock=module.time.monotonic())
        raise died

    with pytest.raises(EnvCrash) as caught:
        tally.watched(call)
    assert caught.value is died
    assert not worker.killed
    # What it left undone says nothing of the next process.
    worker.takes(tally.step_begins)
    assert tally.watched(lambda: 3) == 3
    assert not worker.killed


def test_the_process_that_watches_does_not_end_itself(
    tally: Tally, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def getpid() -> int:
        looked.set()
        return WORKER

    def call() -> None:
        worker.takes(tally.step_begins, clock=1.0)
        monkeypatch.setattr(module.os, "getpid", getpid)
        assert looked.wait(60.0)

    tally.watched(call)
    assert not worker.killed


class Env(gymnasium.Env[Any, Any]):
    """Raises in its third step."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.n = 0

    def reset(self, **given: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.n += 1
        if self.n == 3:
            raise OSError("lost")
        return 0, 0.0, False, False, {}


def test_a_play_counts_its_steps_for_others(tally: Tally) -> None:
    with closing(Tally(tally.path)) as opened:
        play = TalliedPlay(adapt.as_base_env(Env(), 0), opened)
        play.reset()
        for _ in range(5):
            play.step(play.action())
    assert tally.n == play.n_steps == 5
    assert os.path.exists(tally.path)  # it is the other's
    assert tally._values[module._DEADLINE] == 0.0


# -- measuring an env that dies -------------------------------------------------------------------

PROFILE = Profile(Trial(9, 1.0, 0.0, 1, 1, 1.0), (1.0,), (1.0,), n_failed=2, failure="OSError")


class FakeManager:
    """Measures an env that dies in the first attempts, each time of its hundredth step."""

    def __init__(self, n_deaths: int) -> None:
        self.n_deaths = n_deaths
        self.seconds: list[float] = []

    def apply(self, function: Any, seconds: float, path: str, *, env_ids: int) -> list[Profile]:
        self.seconds.append(seconds)
        with closing(Tally(path)) as opened:
            for _ in range(100):
                opened.step_begins()
                opened.step_ends()
        if len(self.seconds) <= self.n_deaths:
            raise crash()
        return [PROFILE]


def test_an_env_that_dies_is_measured_for_a_shorter_time() -> None:
    manager: Any = FakeManager(2)
    found = measure_one(manager, 0.64, None, None)
    assert manager.seconds == [0.64, 0.08, 0.01]
    assert found.profile is PROFILE
    assert found.n_steps == 300
    assert found.n_failed == 2 + PROFILE.n_failed
    assert str(found.failures[0]).endswith("died during random steps: exit code 7")


def test_an_env_that_dies_each_time_is_not_measured() -> None:
    manager: Any = FakeManager(99)
    found = measure_one(manager, 0.3, 1.0, 1.0)
    assert found.profile is None
    assert (found.n_failed, found.n_steps) == (ATTEMPTS, 100 * ATTEMPTS)
    assert manager.seconds[-1] < 1e-6
