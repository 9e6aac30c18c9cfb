"""What is to be tuned: the env by itself, what there is to choose from, and the time for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envmgr.calibrate import TYPICAL, choose
from envmgr.config import ManagerConfig
from envmgr.launch import cores_of
from envmgr.proc import resident_bytes
from envmgr.transport.process.preflight import free_memory
from envmgr.tuning.measuring import Course, Still, anchors_of, figures_of, profiled, stills_of
from envmgr.tuning.model import EnvFigures, Machine, fitted_machine
from envmgr.tuning.plan import candidates
from envmgr.tuning.settings import Setting, pair_of, setting_of
from envmgr.types import EnvFactory
from envmgr.worker.profiling import Profile

LEAST_ENTRANTS, MOST_ENTRANTS = 5, 16
_PROFILE_SHARE, _MOST_PROFILE_S = 0.1, 3.0
_STILLS_SHARE, _LAUNCH_SHARE, _LAP_SHARE = 0.3, 0.3, 0.25
_WINDOW_S, _STEPS, _CYCLES = 0.12, 60, 2.5


@dataclass(frozen=True)
class One:
    """What one env in a worker of its own is like, and how long it took to launch it."""

    profile: Profile
    spaces: tuple[Any, Any]
    worker_bytes: int | None
    launch_s: float


@dataclass(frozen=True)
class Task:
    """What is to be tuned, and what is known before anything is compared."""

    config: Mapping[str, Any]
    env_num: int
    cores: int
    kind: str
    one: One
    env: EnvFigures
    now: Setting
    settings: Sequence[Setting]
    stills: Sequence[Still]

    def machine(self, rates: Sequence[float]) -> Machine:
        """Return what managers cost, from the rates of `stills`; a guess if there are none."""
        if not rates or not all(rates):
            return Machine(self.cores)
        return fitted_machine(anchors_of(self.env_num, rates), self.cores, self.kind)


def task_of(
    config: Mapping[str, Any],
    factories: Sequence[EnvFactory],
    seconds: float,
    kinds: Sequence[str],
) -> Task:
    """Profile an env, and say what there is to choose from."""
    env_num, kind = len(factories), pair_of(config["type"])[0]
    config = {**config, "env_num": env_num}
    cores = cores_of(ManagerConfig.from_mapping(config))
    one = _try_one(config, factories, min(_MOST_PROFILE_S, _PROFILE_SHARE * seconds))
    env, now = figures_of(one.profile), _present(config, env_num, cores, one.profile)
    stills = stills_of(kind, env_num, cores)
    if len(stills) * one.launch_s > _STILLS_SHARE * seconds:
        stills = ()  # a busy machine, or little time: it goes to what can be chosen
    settings = candidates(now, env_num, cores, env, kinds)
    return Task(config, env_num, cores, kind, one, env, now, settings, stills)


def _try_one(config: Mapping[str, Any], factories: Sequence[EnvFactory], seconds: float) -> One:
    began = time.monotonic()
    plain = {**config, "env_num": 1, "seed": None}
    course = Course(Setting(pair_of(config["type"])[0]), plain, factories[:1])
    manager = course.manager
    launch_s = time.monotonic() - began
    try:
        profile: Profile = manager.apply(profiled, seconds)[0]
        workers = manager.stats().get("workers") or [{"pid": 0}]
        spaces = (manager.observation_space, manager.action_space)
        private = resident_bytes(workers[0]["pid"], shared=False) or None
        return One(profile, spaces, private, launch_s)
    finally:
        course.close()


def _present(config: Mapping[str, Any], env_num: int, cores: int, profile: Profile) -> Setting:
    """Return the setting of the config; what `num_workers: auto` becomes is known by now.

    But for what it measures of waking workers: what settings do here is measured itself.
    """
    setting = setting_of(config)
    if config["num_workers"] != "auto":
        return setting
    n = choose(env_num, cores, profile.trial, TYPICAL).num_workers
    return setting._replace(num_workers=None if n == env_num else n)


def most_entrants(seconds: float, one: One, env_num: int, window_s: float) -> int:
    """Return how many settings to launch side by side, for the time and the memory there is."""
    by_time = _LAUNCH_SHARE * seconds / (one.launch_s * (1 + env_num / 16))
    by_lap = _LAP_SHARE * seconds / window_s
    by_memory = float(MOST_ENTRANTS)
    if one.worker_bytes:
        by_memory = 0.5 * free_memory()[0] / (one.worker_bytes * env_num)
    return int(max(2, min(max(min(by_time, by_lap), LEAST_ENTRANTS), MOST_ENTRANTS, by_memory)))


def window_of(left_s: float, env: EnvFigures) -> tuple[float, float]:
    """Return how long to measure a setting each time, and how long to step it before that.

    Many short windows tell more than few long ones, as the machine is now fast and now slow. But
    one should see many steps, and where resets take their time, several episodes.
    """
    window_s = min(_WINDOW_S, left_s / 120)
    window_s = max(window_s, min(_STEPS * env.step_s, left_s / 60))
    if env.reset_s_per_step <= 0.05 * env.step_s:
        return window_s, 0.1 * window_s
    cycle_s = env.reset_s + env.episode_steps * env.step_s
    window_s = max(window_s, min(_CYCLES * cycle_s, left_s / 24))
    return window_s, min(0.3 * window_s, cycle_s)
