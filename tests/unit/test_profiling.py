"""What is measured of an env that is tried out, on clocks that are moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import EpisodePlan, Message, Op, RemoteFailure, ResetRequest
from envmgr.worker.applied import AppliedEnv
from envmgr.worker.host import Host
from envmgr.worker.profiling import Trial, queued_s_of_this_thread, run_trial, try_env


class World:
    """A clock, the CPU time of a process, and an env that uses both.

    Args:
        length: steps per episode.
        step_s: seconds of a step.
        step_cpu_s: those in which it computes.
        first_s: seconds of the very first step.
        reset_s: seconds of a reset.
        queued_s: seconds of each step in which it could have run and had no core.
    """

    def __init__(
        self,
        *,
        length: int = 1000,
        step_s: float = 0.0,
        step_cpu_s: float = 0.0,
        first_s: float = 0.0,
        reset_s: float = 0.0,
        queued_s: float = 0.0,
    ) -> None:
        self.now = self.cpu = self.queued = 0.0
        self._length, self._t = length, 0
        self._step, self._reset_s = (step_s, step_cpu_s, queued_s), reset_s
        self._next_s = first_s or step_s
        self.taken: list[int] = []
        self.resets = 0
        self._actions: Iterator[int] = iter(range(10**9))

    def take(self, action: int) -> bool:
        self.taken.append(action)
        self.now += self._next_s
        self._next_s, cpu_s, queued_s = self._step
        self.cpu += cpu_s
        self.queued += queued_s
        self._t += 1
        return self._t == self._length

    def reset(self) -> None:
        self._t = 0
        self.resets += 1
        self.now += self._reset_s

    def run(self, seconds: float) -> Trial:
        return run_trial(
            self.take,
            self.reset,
            lambda: next(self._actions),
            seconds,
            now_s=lambda: self.now,
            cpu_s=lambda: self.cpu,
            queued_s=lambda: self.queued,
        )


def test_steps_and_resets_are_told_apart() -> None:
    world = World(length=10, step_s=0.5, step_cpu_s=0.5, reset_s=5.0)
    found = world.run(21.0)  # 9 steps, as the first one is not measured; 10; 3 of the third episode
    assert found == Trial(22, 11.0, 0.0, 2, 2, 10.0)
    assert found.step_s == 0.5
    assert found.reset_s == 5.0


def test_the_first_step_does_not_count() -> None:
    world = World(first_s=100.0, step_s=1.0, step_cpu_s=1.0, reset_s=0.25)
    found = world.run(4.0)
    assert (found.n_steps, found.steps_s) == (4, 4.0)
    assert world.taken == [0, 1, 2, 3, 4]


def test_an_env_that_ends_with_its_first_step_is_reset_before_the_next() -> None:
    world = World(length=1, step_s=1.0, reset_s=1.0)
    found = world.run(3.0)
    assert (found.n_steps, found.n_episodes) == (2, 2)
    assert world.resets == 1 + found.n_resets


def test_at_least_one_step_and_one_reset_are_measured() -> None:
    found = World(step_s=8.0, reset_s=16.0).run(0.25)
    assert found == Trial(1, 8.0, 8.0, 0, 1, 16.0)
    assert found.reset_s_per_step == 16.0


def test_a_step_that_sleeps_waits() -> None:
    found = World(step_s=1.0, step_cpu_s=0.25).run(4.0)
    assert found.step_wait_s == 0.75


def test_more_cpu_time_than_time_is_no_waiting() -> None:
    found = World(step_s=1.0, step_cpu_s=3.0).run(4.0)  # several threads
    assert (found.step_s, found.step_wait_s) == (1.0, 0.0)


def test_a_step_that_had_no_core_does_not_wait() -> None:
    found = World(step_s=1.0, step_cpu_s=0.5, queued_s=0.5).run(4.0)
    assert (found.step_s, found.step_wait_s) == (0.5, 0.0)
    found = World(step_s=1.0, step_cpu_s=0.25, queued_s=0.25).run(4.0)
    assert (found.step_s, found.step_wait_s) == (0.75, 0.5)


def test_resets_per_step() -> None:
    found = World(length=5, step_s=1.0, step_cpu_s=1.0, reset_s=2.0).run(40.0)
    assert found.n_episodes >= 2
    assert found.reset_s_per_step == pytest.approx(2.0 * found.n_episodes / found.n_steps)


def test_actions_are_sampled_aside() -> None:
    world = World(step_s=1.0, step_cpu_s=1.0)
    found = run_trial(
        world.take,
        world.reset,
        lambda: setattr(world, "now", world.now + 0.25),
        200.0,
        now_s=lambda: world.now,
        cpu_s=lambda: world.cpu,
        queued_s=lambda: 0.0,
    )
    assert found.step_s == 1.0


def test_the_system_says_how_long_a_thread_was_queued() -> None:
    first = queued_s_of_this_thread()
    assert 0.0 <= first <= queued_s_of_this_thread()


def test_no_such_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert queued_s_of_this_thread() == 0.0


# -- in a host ------------------------------------------------------------------------------------


class ShortEnv:
    """Episodes of three steps; says what it was given."""

    observation_space: Any = Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = Discrete(3)

    def __init__(self, fail: Callable[[], Any] | None = None, abnormal: bool = False) -> None:
        self.actions: list[Any] = []
        self.resets: list[Any] = []
        self._fail, self._abnormal = fail, abnormal

    def reset(self, **params: Any) -> Any:
        self.resets.append(params)
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        if self._fail is not None:
            self._fail()
        self.actions.append(action)
        done = len(self.actions) % 3 == 0 and not self._abnormal
        info = {"abnormal": True} if self._abnormal else {}
        return np.zeros(2, np.float32), 1.0, done, info

    def seed(self, seed: int, dynamic_seed: Any = None) -> None:
        pass


def calibrated(env: Any, seconds: float = 0.0) -> Message:
    """Build, reset and try an env in a host; return the last reply."""
    settings = HostSettings()
    sent: list[Message] = []
    host = Host(
        {0: lambda: env},
        settings,
        encode=lambda m: m,
        send=sent.append,
        memory=lambda nbytes: None,
    )
    order = ResetRequest({"level": 3}, None, None, EpisodePlan(False, 0, {"level": 3}))
    host.handle(Message(Op.HELLO, 0, 0, 1, None))
    host.handle(Message(Op.RESET, 0, 0, 2, order))
    host.handle(Message(Op.APPLY, 0, 0, 3, (try_env, (seconds,))))
    return sent[-1]


def test_a_host_tries_its_env() -> None:
    env = ShortEnv()
    reply = calibrated(env, 0.001)
    assert reply[:4] == (Op.RESULT, 0, 0, 3)
    assert isinstance(reply.payload, Trial)
    assert reply.payload.n_steps + 1 == len(env.actions)
    assert set(env.actions) <= {0, 1, 2}
    assert env.resets
    assert all(params == {"level": 3} for params in env.resets)


def test_a_step_that_calls_itself_abnormal_ends_the_episode() -> None:
    env = ShortEnv(abnormal=True)
    found = calibrated(env).payload
    assert found.n_episodes == found.n_steps


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_what_an_env_raises_is_reported(error: BaseException) -> None:
    def fail() -> None:
        raise error

    reply = calibrated(ShortEnv(fail))
    assert reply.op == Op.FAILED
    assert isinstance(reply.payload, RemoteFailure)
    assert (reply.payload.during, reply.payload.type_name) == ("call", type(error).__name__)


def test_an_action_is_taken_before_the_clock_runs() -> None:
    order: list[str] = []

    class Space:
        def sample(self) -> int:
            return 0

    class Env:
        def reset(self) -> Any:
            order.append("reset")
            return 0

    def step_result(action: Any) -> Any:
        order.append("step")
        return 0, 1.0, True, 0, {}

    found = try_env(AppliedEnv(Env(), step_result, Space(), {}), 0.0)
    assert order == ["step", "reset", "step", "reset"]
    assert (found.n_steps, found.n_episodes, found.n_resets) == (1, 1, 1)
