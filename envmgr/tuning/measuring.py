"""Settings and envs at work: managers that are launched, and stepped for a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from envmgr.env.async_env import as_blocking
from envmgr.env.still import StillEnv
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
        say: told which setting it is.

    Attributes:
        errors: by setting.
    """

    def __init__(
        self,
        open_course: Callable[[Any], Course],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._open_course, self._say = open_course, say
        self._courses: dict[Any, Course] = {}
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
            self.errors[setting] = " ".join(str(error).split())
            self.drop(setting)
            return 0.0

    def drop(self, setting: Any) -> None:
        """Close a setting that is not measured any more."""
        course = self._courses.pop(setting, None)
        if course is not None:
            course.close()

    def close(self) -> None:
        """Close all that are launched."""
        for setting in list(self._courses):
            self.drop(setting)


def is_plain(space: Any) -> bool:
    """Whether values of a space can be drawn from itself, whoever is in the env."""
    return has_samples(space) and not isinstance(space, AgentSpace)


def profiled(env: Any, seconds: float) -> Profile:
    """Profile an env where it is; for `manager.apply`."""
    return profile_env(as_blocking(env), None, seconds)


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


class Still(NamedTuple):
    """Envs that do nothing, in a setting: what is measured of them is what managers cost.

    Attributes:
        env_num: how many.
        setting: of a sync kind with workers.
    """

    env_num: int
    setting: Setting

    def __str__(self) -> str:
        return f"what managers cost: {self.setting}"


def stills_of(kind: str, env_num: int, cores: int) -> tuple[Still, ...]:
    """Return those that the model is fitted to: one, all in a worker, one each, one per core."""
    one = Still(1, Setting(kind))
    if env_num == 1:
        return (one,)
    all_of = (Still(env_num, Setting(kind, 1)), Still(env_num, Setting(kind)))
    spread = (Still(env_num, Setting(kind, cores)),) if 1 < cores < env_num else ()
    return (one, *all_of, *spread)


def still_course(
    still: Still,
    spaces: tuple[Any, Any],
    config: Mapping[str, Any],
    policy_of: Callable[[EnvManager], Act] | None = None,
) -> Course:
    """Launch envs that do nothing.

    Args:
        still: how many, and how.
        spaces: of observations and actions.
        config: of the manager.
        policy_of: see `Course`; what it costs is among the costs of the machine.
    """
    if not all(map(is_plain, spaces)):
        spaces, policy_of = _STAND_INS, None
    plain = {**config, "env_num": still.env_num, "seed": None, "preload": None}
    factories = [lambda: StillEnv(*spaces)] * still.env_num
    return Course(still.setting, plain, factories, policy_of)


def anchors_of(env_num: int, rates: Sequence[float]) -> Anchors:
    """Return what the model is fitted to, from the rates of `stills_of`, in their order."""
    return Anchors(env_num, *(rates if len(rates) > 1 else (*rates, *rates, *rates)))
