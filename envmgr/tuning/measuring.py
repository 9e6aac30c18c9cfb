"""Launches managers and steps them for a while, to measure their speed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from envmgr.env.async_env import as_blocking
from envmgr.errors import EnvCrash, EnvFailure, EnvManagerError, NothingReadyError
from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop
from envmgr.manager.tally import ATTEMPTS, LESS, EnvHang, TalliedPlay, Tally
from envmgr.shortcuts import create_env_manager
from envmgr.spaces import is_sampled_alone
from envmgr.spaces.legal import has_mask, mask_in
from envmgr.tuning.settings import Setting
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile, profile_env

Act = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""A policy: `{env_id: obs}` to `{env_id: action}`."""

PolicyOf = Callable[[EnvManager], Act]
"""A function that returns the policy for a launched manager."""

ErrorText = Callable[[EnvManagerError], str]
"""A function that returns an error's message as a command shows it, in several lines if need be."""

_ACTIONS = 257
"""How many actions are drawn for each env before the clock runs; not a power of two."""

MANY = 1_000_000


class Runner(Protocol):
    """Something that can be stepped for a while, again and again."""

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        """Step for some seconds, after a lead that does not count; return steps per second."""

    def close(self) -> None:
        """End the runner."""


class Course:
    """A launched manager with one setting that can be stepped for a while, again and again.

    Args:
        config: all other keys of the manager's config.
        policy_of: returns the policy for a launched manager; None acts at random, at no cost.

    Attributes:
        manager: the launched manager.
    """

    def __init__(
        self,
        setting: Setting,
        config: Mapping[str, Any],
        factories: Sequence[EnvFactory],
        policy_of: PolicyOf | None = None,
    ) -> None:
        changes = {
            **setting.as_config(),
            "episode_num": float("inf"),
            "auto_reset": True,
            "max_failures_total": MANY,
            # These tell a user about one run, and are not for the several managers here.
            "trace": None,
            "episode_log": None,
        }
        if not setting.has_workers:
            changes["worker_log"] = None  # only of worker processes
        if config.get("metrics"):
            changes["metrics"] = {**config["metrics"], "port": None}
        self.manager: EnvManager = create_env_manager({**config, **changes}, env_fn=factories)
        try:
            self.manager.launch()
            self._loop = ManagerLoop(self.manager)
            self._act = policy_of(self.manager) if policy_of else drawn_before(self._loop)
        except BaseException:
            self.manager.close()
            raise

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        """Step for some seconds, after a lead that does not count; return steps per second."""
        stepped_for(self._step, lead_s)
        return stepped_for(self._step, seconds)

    def _step(self) -> int:
        loop = self._loop
        try:
            return len(loop.step(self._act(loop.ready())))
        except NothingReadyError:  # all that is ready is under way
            return len(loop.gather())

    def close(self) -> None:
        """Close the manager."""
        self.manager.close()


def stepped_for(step: Callable[[], int], seconds: float) -> float:
    """Take batches of steps for some seconds, at least one batch; return steps per second.

    Args:
        step: takes a batch, and returns how many steps were in it.
        seconds: after how long to stop.
    """
    clock = time.perf_counter
    steps, began = 0, clock()
    end = began + seconds
    while True:
        steps += step()
        now = clock()
        if now >= end:
            return steps / max(now - began, 1e-9)


def drawn_before(loop: ManagerLoop) -> Act:
    """Return a policy of random actions, which are drawn beforehand where that is possible."""
    manager = loop.manager
    space = manager.action_space
    if not is_sampled_alone(space) or has_mask(manager.observation_space):  # the envs know which
        return loop.random_actions
    if any(mask_in(None, info) is not None for info in manager.ready_info.values()):
        return loop.random_actions
    actions = itertools.cycle([space.sample() for _ in range(_ACTIONS)])
    return lambda obs: {i: next(actions) for i in obs}


class Stable:
    """The runners that stay launched while they are measured in turns.

    A setting that cannot be run has the rate 0, and its error is kept.

    Args:
        say: called with the setting that is measured next.
        error_text: returns an error's message as it is shown.

    Attributes:
        errors: error messages by setting, as they are shown.
    """

    def __init__(
        self,
        open_course: Callable[[Any], Runner],
        say: Callable[[str], None] = lambda text: None,
        error_text: ErrorText = str,
    ) -> None:
        self._open_course, self._say, self._error_text = open_course, say, error_text
        self._courses: dict[Any, Runner] = {}
        self.errors: dict[Any, str] = {}

    def measure(self, setting: Any, seconds: float, lead_s: float = 0.0) -> float:
        """Return steps per second of a setting, launching it and warming it up if need be."""
        if setting in self.errors:
            return 0.0
        self._say(str(setting))
        try:
            if setting not in self._courses:
                self._courses[setting] = self._open_course(setting)
                lead_s += seconds / 2
            return self._courses[setting].run(seconds, lead_s)
        except EnvManagerError as error:
            self.errors[setting] = self._error_text(error)
            self.drop(setting)
            return 0.0

    def drop(self, setting: Any) -> None:
        """Close the runner of a setting that is not measured any more."""
        course = self._courses.pop(setting, None)
        if course is not None:
            course.close()

    def close(self) -> None:
        """Close all launched runners."""
        for setting in list(self._courses):
            self.drop(setting)


class Attempts(NamedTuple):
    """What came of the attempts to measure one env.

    Attributes:
        profile: the measurements; None if the env ended its process, or hung, at each attempt.
        n_steps: how many steps were tried in all of them.
        failures: how those before ended.
    """

    profile: Profile | None
    n_steps: int
    failures: Sequence[EnvFailure]

    @property
    def n_failed(self) -> int:
        """How many of the steps failed, and resets."""
        return len(self.failures) + (self.profile.n_failed if self.profile is not None else 0)


def measure_one(
    manager: EnvManager, seconds: float, step_s: float | None, reset_s: float | None
) -> Attempts:
    """Measure env 0 of a manager; for a shorter time if it crashes its process, or hangs.

    Args:
        manager: launched, with envs in worker processes, and a budget for failures.
        seconds: how long to step the env.
        step_s: the time limit of a step; None: no limit.
        reset_s: likewise of a reset.

    Raises:
        EnvFailure: the env raises again and again, or hangs where it neither steps nor resets.
    """
    tally = Tally(step_s=step_s or math.inf, reset_s=reset_s or math.inf)
    failures: list[EnvFailure] = []
    with contextlib.closing(tally):
        for attempt in range(ATTEMPTS):
            steps = random_steps, seconds / LESS**attempt, tally.path
            try:
                (profile,) = tally.watched(functools.partial(manager.apply, *steps, env_ids=0))
            except (EnvCrash, EnvHang) as failure:
                named = f"apply({random_steps.__name__})"  # which says nothing to a user
                failure.args = (str(failure).replace(named, "random steps"),)
                failures.append(failure)
            else:
                return Attempts(profile, tally.n, failures)
        return Attempts(None, tally.n, failures)


def random_steps(env: Any, seconds: float, tally: str) -> Profile:
    """Profile an env in the process where it runs; for `manager.apply`.

    Args:
        env: the env.
        seconds: how long to step it.
        tally: path of the `Tally` in which its steps are counted.
    """
    env = as_blocking(env)
    with contextlib.closing(Tally(tally)) as opened:
        return profile_env(env, seconds, TalliedPlay(env, opened))
