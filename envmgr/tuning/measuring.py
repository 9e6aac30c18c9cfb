"""Settings and envs at work: managers that are launched, and stepped for a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
from typing_extensions import Self

from envmgr.env import adapt
from envmgr.errors import EnvManagerError, NothingReadyError
from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop
from envmgr.registry import create_env_manager
from envmgr.spaces import AgentSpace, has_samples
from envmgr.tuning.model import Anchors, EnvFigures
from envmgr.tuning.settings import Setting
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile, profile_env

Act = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""A policy: `{env_id: obs}` to `{env_id: action}`."""

_ACTIONS = 257
"""How many actions are drawn for each env before the clock runs; no power of two."""

_MANY = 1_000_000
_SAMPLE = 500
_STAND_INS = (gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32), gymnasium.spaces.Discrete(2))


class Course:
    """A launched manager with one setting, that can be stepped for a while again and again.

    Args:
        setting: what to set.
        config: all else of the manager's config.
        factories: of the envs.
        policy_of: returns the policy for a launched manager; None acts at random, at no cost.
        changes: keys to set in place of the setting's.

    Attributes:
        manager: launched.
    """

    def __init__(
        self,
        setting: Setting,
        config: Mapping[str, Any],
        factories: Sequence[EnvFactory],
        policy_of: Callable[[EnvManager], Act] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        changes = {
            **(setting.as_config() if changes is None else changes),
            "episode_num": float("inf"),
            "auto_reset": True,
            "max_failures_total": _MANY,
        }
        self.manager: EnvManager = create_env_manager({**config, **changes}, env_fn=factories)
        try:
            self.manager.launch()
            self._loop = ManagerLoop(self.manager)
            self._act = (policy_of or drawn_before)(self.manager)
        except BaseException:
            self.manager.close()
            raise

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        """Step for some seconds, after some that do not count; return steps per second."""
        self._step_for(lead_s)
        return self._step_for(seconds)

    def _step_for(self, seconds: float) -> float:
        loop, act, clock = self._loop, self._act, time.perf_counter
        steps, began = 0, clock()
        end = began + seconds
        while True:
            try:
                timesteps = loop.step(act(loop.ready()))
            except NothingReadyError:  # all that is ready is under way
                timesteps = loop.gather()
            steps += len(timesteps)
            now = clock()
            if now >= end:
                return steps / max(now - began, 1e-9)

    def close(self) -> None:
        """Close the manager."""
        self.manager.close()


def drawn_before(manager: EnvManager) -> Act:
    """Return a policy that takes random actions which were drawn before, where that can be done."""
    space = manager.action_space
    if not is_plain(space):  # what actions there are only the envs know
        return lambda obs: manager.random_action()
    actions = itertools.cycle([space.sample() for _ in range(_ACTIONS)])
    return lambda obs: {i: next(actions) for i in obs}


class Stable:
    """Keeps courses launched while they are measured in turns.

    A setting that cannot be run has the rate 0, and its error is kept.

    Args:
        open_course: launches one.
        seconds: how long to step it each time.
        lead_s: how long before that.
        say: told which setting it is.

    Attributes:
        errors: by setting.
    """

    def __init__(
        self,
        open_course: Callable[[Setting], Course],
        seconds: float,
        lead_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._open_course, self._say = open_course, say
        self._seconds, self._lead_s = seconds, lead_s
        self._courses: dict[Setting, Course] = {}
        self.errors: dict[Setting, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for setting in list(self._courses):
            self.drop(setting)

    def measure(self, setting: Setting) -> float:
        """Return steps per second of a setting, launching it if need be."""
        if setting in self.errors:
            return 0.0
        self._say(str(setting))
        try:
            if setting not in self._courses:
                self._courses[setting] = self._open_course(setting)
            return self._courses[setting].run(self._seconds, self._lead_s)
        except EnvManagerError as error:
            self.errors[setting] = " ".join(str(error).split())
            self.drop(setting)
            return 0.0

    def drop(self, setting: Setting) -> None:
        """Close a setting that is not measured any more."""
        course = self._courses.pop(setting, None)
        if course is not None:
            course.close()


def is_plain(space: Any) -> bool:
    """Whether values of a space can be drawn from itself, whoever is in the env."""
    return has_samples(space) and not isinstance(space, AgentSpace)


class StillEnv(gymnasium.Env[Any, Any]):
    """Does nothing; its spaces are those of another env.

    Args:
        observation_space: of the other env.
        action_space: likewise.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._obs = observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        return self._obs, 0.0, False, False, {}


def profiled(env: Any, seconds: float) -> Profile:
    """Profile an env where it is; for `manager.apply`."""
    return profile_env(adapt.as_base_env(env, 0), None, seconds)


def figures_of(profile: Profile) -> EnvFigures:
    """Return what the model wants to know of a profile, on a core of the env's own."""
    steps, resets = _even_sample(profile.own_steps_s), _even_sample(profile.resets_s)
    length = profile.episode_steps
    return EnvFigures(
        steps_s=steps.tolist(),
        wait_share=profile.wait_share,
        resets_s=(resets * profile.own_share).tolist(),
        reset_wait_share=profile.reset_wait_share,
        episode_steps=float("inf") if length is None else length,
    )


def _even_sample(durations_s: Sequence[float]) -> Any:
    found = np.asarray(durations_s, np.float64)
    return found[:: max(1, len(found) // _SAMPLE)]


def anchors_of(
    spaces: tuple[Any, Any],
    kind: str,
    config: Mapping[str, Any],
    cores: int,
    seconds: float,
    policy_of: Callable[[EnvManager], Act] | None = None,
) -> Anchors:
    """Measure what managers of envs that do nothing do here.

    Args:
        spaces: of observations and actions.
        kind: registry key of a sync kind with workers.
        config: of the manager.
        cores: that may be used.
        seconds: for each measurement; there are four at most.
        policy_of: see `Course`; what it costs is among the costs of the machine.
    """
    env_num = int(config["env_num"])
    if not all(map(is_plain, spaces)):
        spaces, policy_of = _STAND_INS, None

    def rate(n: int, num_workers: int | None) -> float:
        factories = [lambda: StillEnv(*spaces)] * n
        plain = {**config, "env_num": n, "seed": None, "preload": None}
        course = Course(Setting(kind, num_workers), plain, factories, policy_of)
        try:
            return course.run(seconds, seconds / 4)
        finally:
            course.close()

    one = rate(1, None)
    if env_num == 1:
        return Anchors(1, one, one, one)
    spread = rate(env_num, cores) if 1 < cores < env_num else None
    return Anchors(env_num, one, rate(env_num, 1), rate(env_num, None), spread)
