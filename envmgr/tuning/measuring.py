"""Launches managers and steps them for a while, to measure their speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from envmgr.env.async_env import as_blocking
from envmgr.errors import EnvManagerError, NothingReadyError
from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop
from envmgr.shortcuts import create_env_manager
from envmgr.spaces import is_sampled_alone
from envmgr.spaces.legal import has_mask
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

_MANY = 1_000_000


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
            "max_failures_total": _MANY,
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
            self._act = (policy_of or drawn_before)(self.manager)
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


def drawn_before(manager: EnvManager) -> Act:
    """Return a policy of random actions, which are drawn beforehand where that is possible."""
    space = manager.action_space
    if not is_sampled_alone(space) or has_mask(manager.observation_space):  # the envs know which
        return ManagerLoop(manager).random_actions
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


def random_steps(env: Any, seconds: float) -> Profile:
    """Profile an env in the process where it runs; for `manager.apply`."""
    return profile_env(as_blocking(env), seconds)
