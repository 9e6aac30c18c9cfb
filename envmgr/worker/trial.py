"""A trial of an env: random steps and resets, timed, to learn what kind of work they are.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from envmgr.env import adapt
from envmgr.proc import queued_s_of
from envmgr.types import is_abnormal
from envmgr.worker.applied import AppliedEnv

_CHUNK = 64
"""Actions sampled at a time, so that sampling is not measured."""


class Trial(NamedTuple):
    """What a trial measured.

    Attributes:
        n_steps: steps; the very first one, which may be unlike all others, is not among them.
        steps_s: seconds that they took together, but for those that it waited for a core.
        steps_wait_s: those of them in which the process had nothing to do: it slept, or waited for
            a device or for another process.
        n_episodes: episodes that these steps ended.
        n_resets: resets; the first one is not among them.
        resets_s: seconds that these took together, likewise.
    """

    n_steps: int
    steps_s: float
    steps_wait_s: float
    n_episodes: int
    n_resets: int
    resets_s: float

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.steps_s / self.n_steps

    @property
    def step_wait_s(self) -> float:
        """Seconds that one step waits."""
        return self.steps_wait_s / self.n_steps

    @property
    def reset_s(self) -> float:
        """Seconds of one reset."""
        return self.resets_s / self.n_resets

    @property
    def reset_s_per_step(self) -> float:
        """Seconds of resets that come with one step.

        If no episode ended, it is taken to be as long as the steps that were measured.
        """
        return self.reset_s * max(self.n_episodes, 1) / self.n_steps


def try_env(applied: AppliedEnv, seconds: float) -> Trial:
    """Take random steps in an env that has been reset, and reset it when an episode ends.

    At least one step and one reset are measured, however long they take.

    Args:
        applied: the env.
        seconds: when to stop.

    Raises:
        Exception: whatever the env raises.
    """
    env, step_result, action_space, params, _ = applied

    def take(action: Any) -> bool:
        _, _, done, _, info = step_result(action)
        return done or (bool(info) and is_abnormal(info))

    def reset() -> None:
        adapt.reset_env(env, params)

    return run_trial(take, reset, adapt.sampler_of(env, action_space), seconds)


def run_trial(
    take: Callable[[Any], bool],
    reset: Callable[[], None],
    sample: Callable[[], Any],
    seconds: float,
    *,
    now_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.process_time,
    queued_s: Callable[[], float] | None = None,
) -> Trial:
    """Measure steps and resets; see `try_env`.

    Args:
        take: takes one action; returns whether the episode ended.
        reset: begins the next episode.
        sample: returns an action.
        seconds: when to stop.
        now_s: the clock.
        cpu_s: seconds of CPU time that all threads of this process have used.
        queued_s: seconds that this thread could have run and had no core; None asks the system.
    """
    queued_s = queued_s_of_this_thread if queued_s is None else queued_s
    steps, resets = _Stopwatch(now_s, cpu_s), _Stopwatch(now_s, cpu_s)
    if take(sample()):  # compiles, loads, connects: what no other step does
        reset()
    n_steps = n_episodes = n_resets = 0
    begin, queued_before_s = now_s(), queued_s()
    end, is_over = begin + seconds, False
    while not is_over:
        actions = [sample() for _ in range(_CHUNK)]
        done = False
        with steps:
            for action in actions:
                done = take(action)
                n_steps += 1
                if done or now_s() >= end:
                    break
        is_over = now_s() >= end
        n_episodes += bool(done)
        if (is_over and not n_resets) or (done and not is_over):
            with resets:
                reset()
            n_resets += 1
    own_share = 1.0 - min((queued_s() - queued_before_s) / max(now_s() - begin, 1e-9), 1.0)
    steps_s, resets_s = steps.wall_s * own_share, resets.wall_s * own_share
    wait_s = max(steps_s - steps.cpu_s, 0.0)
    return Trial(n_steps, steps_s, wait_s, n_episodes, n_resets, resets_s)


def queued_s_of_this_thread() -> float:
    """Return how long this thread has waited for a core; 0 where the system does not tell."""
    try:
        return queued_s_of("thread-self")
    except (OSError, ValueError, IndexError):
        return 0.0


class _Stopwatch:
    """Adds up the wall time and the CPU time of what runs in its context."""

    def __init__(self, now_s: Callable[[], float], cpu_s: Callable[[], float]) -> None:
        self._now_s, self._cpu_s = now_s, cpu_s
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._wall_before_s, self._cpu_before_s = self._now_s(), self._cpu_s()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cpu_s += self._cpu_s() - self._cpu_before_s
        self.wall_s += self._now_s() - self._wall_before_s
