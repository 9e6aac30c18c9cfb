"""Measures one env: how long its steps and resets take, and how much they wait.

A `Trial` has sums and counts of random steps, taken in an env that a host already runs (`try_env`),
to find out how many workers are worth it. A `Profile` has each single duration as well, of an env
that was built for the purpose (`profile_env`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from envmgr.env import adapt
from envmgr.env.async_env import as_blocking
from envmgr.env.play import RandomPlay
from envmgr.env.steps import step_function
from envmgr.proc import queued_s_of
from envmgr.spaces.legal import has_mask
from envmgr.types import is_abnormal
from envmgr.worker.applied import AppliedEnv

_CHUNK = 64
"""Actions sampled at a time, so that sampling is not measured."""


class Trial(NamedTuple):
    """The measurements of a trial.

    Attributes:
        n_steps: number of steps, without the very first one, which may be unlike all others.
        steps_s: seconds that these steps took together, without the time of waiting for a core.
        steps_wait_s: the part of `steps_s` in which the process had nothing to do: it slept, or
            waited for a device or for another process.
        n_episodes: number of episodes that these steps ended.
        n_resets: number of resets, without the first one.
        resets_s: seconds that these resets took together, likewise.
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
        """Seconds of resets per step.

        If no episode ended, an episode is taken to be as long as the steps that were measured.
        """
        return self.reset_s * max(self.n_episodes, 1) / self.n_steps


def try_env(applied: AppliedEnv, seconds: float) -> Trial:
    """Take random steps in an env that has been reset, and reset it when an episode ends.

    At least one step and one reset are measured, however long they take.

    Args:
        applied: the env.
        seconds: when to stop.

    Raises:
        Exception: whatever the env raises, again and again.
    """
    env, step_result, action_space, params, _ = applied
    if adapt.is_async(env):
        env = as_blocking(env)
        step_result = step_function(env)

    def take(action: Any) -> bool:
        _, _, done, _, info = step_result(action)
        return done or (bool(info) and is_abnormal(info))

    def reset() -> None:
        adapt.reset_env(env, params)

    if not has_mask(getattr(env, "observation_space", None)):
        try:
            return run_trial(take, reset, adapt.sampler_of(env, action_space), seconds)
        except Exception as error:  # now and then; if not, it is raised below
            raised = error
    else:
        raised = None
    play = RandomPlay(env, action_space)
    play.reset(params)
    trial = run_trial(*_functions_of(play, params), seconds)
    if raised is not None and play.n_failed >= play.n_steps:
        raise raised
    return trial


def _functions_of(
    play: RandomPlay, params: Mapping[str, Any] | None
) -> tuple[Callable[[Any], bool], Callable[[], None], Callable[[], Any]]:
    """Return the functions that take an action, begin an episode and draw actions in a play."""
    is_free = play.is_free

    def take(action: Any) -> bool:
        timestep = play.step(action if is_free else play.action())
        return timestep.done or (bool(timestep.info) and is_abnormal(timestep.info))

    def reset() -> None:
        play.reset(params)

    return take, reset, play.action if is_free else lambda: None


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
        queued_s: seconds in which this thread could have run but had no core; None asks the system.
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


# -- profiles -----------------------------------------------------------------------------------

MOST_KEPT = 4096
"""How many durations are kept: the first ones."""


class Profile(NamedTuple):
    """The measurements of an env.

    Attributes:
        trial: sums and counts, on a core of the env's own.
        steps_s: durations of steps, the first `MOST_KEPT` of them.
        resets_s: likewise of resets.
        n_failed: how many steps and resets raised.
        failure: what the first of them raised, and where.
        episode_steps: mean length of the episodes that ended; None if none did.
    """

    trial: Trial
    steps_s: tuple[float, ...]
    resets_s: tuple[float, ...]
    n_failed: int = 0
    failure: str = ""
    episode_steps: float | None = None

    @property
    def own_steps_s(self) -> Any:
        """Durations of steps as an array, on a core of the env's own.

        It is not known which of the longest steps had to wait for a core: they count as the 99th
        percentile, and all durations are scaled so that their mean is right.
        """
        steps = np.array(self.steps_s)
        steps = np.minimum(steps, np.percentile(steps, 99))
        return steps * (self.trial.step_s / max(float(steps.mean()), 1e-12))

    @property
    def wait_share(self) -> float:
        """The part of a step in which the process had nothing to do; 0 to 1."""
        return min(1.0, self.trial.steps_wait_s / max(self.trial.steps_s, 1e-12))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, times in seconds."""
        steps, trial = self.own_steps_s, self.trial
        return {
            "n_steps": trial.n_steps,
            "n_episodes": trial.n_episodes,
            "step_mean_s": trial.step_s,
            "step_std_s": float(steps.std()),
            "step_p50_s": float(np.percentile(steps, 50)),
            "step_p99_s": float(np.percentile(steps, 99)),
            "step_max_s": max(self.steps_s),
            "step_wait_share": self.wait_share,
            "reset_mean_s": trial.reset_s,
            "reset_p50_s": float(np.percentile(self.resets_s, 50)),
            "reset_max_s": max(self.resets_s),
            "episode_steps": self.episode_steps,
        }


def profile_env(env: Any, seconds: float, play: RandomPlay | None = None) -> Profile:
    """Take random steps in an env, and reset it where an episode ends.

    Args:
        env: as `adapt.as_base_env` returns it; it is reset here first.
        seconds: when to stop; at least one step and one reset are measured.
        play: takes the steps; None: a new one.

    Raises:
        Exception: whatever the env raises, again and again.
    """
    play = RandomPlay(env) if play is None else play
    play.reset()
    profile = run_profile(*_functions_of(play, None), seconds)
    return profile._replace(n_failed=play.n_failed, failure=play.failure)


def run_profile(
    take: Callable[[Any], bool],
    reset: Callable[[], None],
    sample: Callable[[], Any],
    seconds: float,
    *,
    now_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.process_time,
    queued_s: Callable[[], float] = queued_s_of_this_thread,
) -> Profile:
    """Measure steps and resets; the arguments are those of `run_trial`."""
    steps_s: list[float] = []
    resets_s: list[float] = []
    length = n_ended = n_steps_of_ended = 0

    def timed_take(action: Any) -> bool:
        nonlocal length, n_ended, n_steps_of_ended
        began = now_s()
        done = take(action)
        if len(steps_s) <= MOST_KEPT:
            steps_s.append(now_s() - began)
        length += 1
        if done:
            n_ended += 1
            n_steps_of_ended += length
            length = 0
        return done

    def timed_reset() -> None:
        nonlocal length
        began = now_s()
        reset()
        resets_s.append(now_s() - began)
        length = 0

    trial = run_trial(
        timed_take, timed_reset, sample, seconds, now_s=now_s, cpu_s=cpu_s, queued_s=queued_s
    )
    # The first step is unlike the others: it is not in the sums either, nor is its reset.
    return Profile(
        trial,
        tuple(steps_s[1:]),
        tuple(resets_s[-trial.n_resets :][:MOST_KEPT]),
        episode_steps=n_steps_of_ended / n_ended if n_ended else None,
    )
