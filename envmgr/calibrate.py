"""`num_workers: auto`: how many workers share the envs, found by trying one env in a worker.

The worker is of the same kind as the real ones and ends before the first of them starts.
docs/decisions/0010-calibration.md says why the rule is as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from envmgr.config import ManagerConfig
from envmgr.core import Phase, Supervisor
from envmgr.core.engine import Engine
from envmgr.core.launching import await_all, build_all, reset_all
from envmgr.core.submit import submit_calls
from envmgr.errors import EnvFailure, LaunchError
from envmgr.launch import cores_of
from envmgr.texts import short_time
from envmgr.wire.messages import Op
from envmgr.worker.profiling import Trial, try_env

logger = logging.getLogger("envmgr")

STEPPING_S = 0.3
"""How long an env is stepped."""

PATIENCE_S = 5.0
"""How long the first reset may take, and the stepping with whatever hangs in it; shorter time
limits of the config hold here, too."""

WAKE_UP_S = 50e-6
"""What a worker with one env pays per step for being woken, and the trainer for being answered."""

COSTLY_STEP_S = 2e-3
"""Steps that take longer gain less than 3 % from sharing, and the system can balance them."""


class Choice(NamedTuple):
    """How many workers, and why."""

    num_workers: int
    reason: str


@dataclass(frozen=True)
class Calibration:
    """What `num_workers: auto` has become, and the figures behind it.

    Attributes:
        env_num: number of envs.
        usable_cores: cores that workers may run on.
        choice: how many workers, and why.
        construction_s: seconds from the start of the process to the env built; None if it never
            was.
        trial: what was measured; None if the env could not be tried out.
    """

    env_num: int
    usable_cores: int
    choice: Choice
    construction_s: float | None = None
    trial: Trial | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, times in seconds; for `stats()`."""
        trial = self.trial
        known = {
            "num_workers": self.choice.num_workers,
            "reason": self.choice.reason,
            "usable_cores": self.usable_cores,
            "construction_s": self.construction_s,
        }
        if trial is None:
            return known
        return {
            **known,
            "step_s": trial.step_s,
            "step_wait_s": trial.step_wait_s,
            "reset_s": trial.reset_s,
            "n_steps": trial.n_steps,
            "n_episodes": trial.n_episodes,
        }

    def __str__(self) -> str:
        n = self.choice.num_workers
        workers = "one worker per env" if n == self.env_num else f"{n} worker{'s' * (n > 1)}"
        text = (
            f"num_workers: auto: {workers} for {self.env_num} envs on {self.usable_cores} usable "
            f"cores: {self.choice.reason}"
        )
        if self.trial is None or self.construction_s is None:
            return text
        trial = self.trial
        return (
            f"{text} (a step takes {short_time(trial.step_s)}, of which it waits "
            f"{short_time(trial.step_wait_s)}; a reset {short_time(trial.reset_s)}; measured over "
            f"{trial.n_steps} steps and {trial.n_episodes} episodes; built in "
            f"{short_time(self.construction_s)})"
        )


def choose(env_num: int, usable_cores: int, trial: Trial) -> Choice:
    """Decide how many workers share the envs.

    Sharing a worker saves a wake-up per step. It costs the time in which one env keeps a core idle
    that its neighbours could use: where it waits, and where others wait for its reset. Envs share
    workers if that is less than what they save.

    Args:
        env_num: number of envs.
        usable_cores: cores that workers may run on.
        trial: what one env does.
    """
    step_s = trial.step_s
    if step_s > COSTLY_STEP_S:
        return Choice(env_num, f"a step takes so long that {short_time(WAKE_UP_S)} do not matter")
    # Each worker has as much to do in a batch as it costs to wake it.
    n = max(1, min(env_num, usable_cores, int(env_num * step_s / WAKE_UP_S)))
    if n == env_num:
        return Choice(n, "there is a core for each env")
    costs_s = {
        "its steps wait": trial.step_wait_s,
        "its resets would keep neighbours waiting": trial.reset_s_per_step,
    }
    cost_s = sum(costs_s.values())
    if cost_s > WAKE_UP_S:
        reason = max(costs_s, key=lambda name: costs_s[name])
        return Choice(env_num, f"{reason}: sharing would cost {short_time(cost_s)} per step")
    saved = f"sharing saves about {short_time(WAKE_UP_S)} per step and costs {short_time(cost_s)}"
    return Choice(n, f"its steps are cheap and need a core: {saved}")


def trial_config_of(config: ManagerConfig) -> ManagerConfig:
    """Return the config of an engine whose one env is tried out; `try_out` keeps the time."""
    return replace(
        config,
        env_num=1,
        num_workers=None,
        seed=None,
        start_steps=0,
        max_retry=1,
        step_timeout=None,
        reset_timeout=None,
        max_worker_rss_mb=None,
        max_episodes_per_worker=None,
    )


class WorkerCount:
    """Finds what `num_workers: auto` of a manager becomes, before its first launch.

    What is found holds for later launches, too; if env 0 could not be tried out, the next one tries
    again.

    Args:
        asked: the config of the manager, as it was given.
        env_num: number of its envs.
        packs_envs: whether its workers can have several of them.

    Attributes:
        asked: see above.
        calibration: what was found; None as long as nothing was.
    """

    def __init__(self, asked: ManagerConfig, env_num: int, *, packs_envs: bool) -> None:
        self.asked = asked
        self.calibration: Calibration | None = None
        self._env_num = env_num
        self._is_auto = asked.num_workers == "auto" and packs_envs and env_num > 1
        self._trials: list[Engine] = []

    @property
    def is_open(self) -> bool:
        """Whether there is still to be found out how many workers there are."""
        return self._is_auto and (self.calibration is None or self.calibration.trial is None)

    def find(
        self,
        open_trial: Callable[[ManagerConfig, Callable[[Engine], None]], None],
        prepare: Callable[[Supervisor], None],
    ) -> ManagerConfig:
        """Try env 0 out.

        Args:
            open_trial: opens an engine for it with a config, and has it kept; see `open_engine`.
            prepare: gives it the params and the seed of its first reset.

        Returns:
            The config to launch with, in which `num_workers` is a number.

        Raises:
            ConfigError, LaunchError, ManagerClosedError: as `try_out` and `open_engine`.
        """
        asked, cores = self.asked, cores_of(self.asked)
        try:
            self._end_all()  # what Ctrl-C has left of an earlier one
            open_trial(trial_config_of(asked), self._trials.append)
            (engine,) = self._trials
            with engine.calling as supervisor:
                prepare(supervisor)
                self.calibration = found = try_out(engine, asked, self._env_num, cores)
                engine.close(0.0 if found.trial is None else asked.close_timeout)
        finally:
            self._end_all()
        return self.config_of(found)

    def config_of(self, found: Calibration) -> ManagerConfig:
        """Return the config to launch with, by what was found."""
        return replace(self.asked, num_workers=found.choice.num_workers)

    def _end_all(self) -> None:
        self.stop()
        self._trials.clear()

    def stop(self) -> None:
        """End a trial that is under way, perhaps in another thread."""
        for engine in self._trials.copy():
            engine.close(0.0)


def try_out(engine: Engine, config: ManagerConfig, env_num: int, cores: int) -> Calibration:
    """Try the one env of an engine out, decide how many workers share the envs, and log it.

    An env that fails is not reported here: each gets a worker of its own, and the launch that
    follows says what is wrong. The engine's lock is held; it is of no other use afterwards.

    Args:
        engine: see `trial_config_of`.
        config: that of the manager.
        env_num: number of its envs.
        cores: on which its workers may run.

    Raises:
        ConfigError: the factory cannot be sent to a worker.
        ManagerClosedError: the engine was closed.
    """
    construction_s = trial = None
    engine.supervisor.repair.quiet = True
    began = engine.now()
    try:
        build_all(engine)
        construction_s = engine.now() - began
        engine.supervisor.place_observations(same_spaces=True)
        trial = _measure(engine, config)
    except LaunchError as error:
        reason, *_ = str(error.failures.get(0, error)).splitlines()
        choice = Choice(env_num, f"an env could not be tried out: {reason}")
    else:
        choice = choose(env_num, cores, trial)
    calibration = Calibration(env_num, cores, choice, construction_s, trial)
    logger.info("%s", calibration)
    return calibration


def _measure(engine: Engine, config: ManagerConfig) -> Trial:
    limits = (config.step_timeout, config.reset_timeout)
    step_s, reset_s = (PATIENCE_S if limit is None else limit for limit in limits)
    reset_all(engine, min(reset_s, PATIENCE_S))
    (env,) = engine.supervisor.envs
    supervisor = engine.supervisor
    payload = try_env, (STEPPING_S,)
    submit_calls(supervisor.hosts, supervisor.envs[:1], Op.APPLY, [payload], "the trial")
    # The first step and its reset, the last ones, and the time between them.
    limit_s = STEPPING_S + min(2.0 * (step_s + reset_s), PATIENCE_S)
    await_all(engine, lambda: env.phase is not Phase.CALLING, "its steps", limit_s)
    if isinstance(env.result, EnvFailure):
        raise LaunchError(str(env.result))
    if not _is_sound(env.result):
        raise LaunchError("its worker answered with something else than a trial")
    return env.result


def _is_sound(trial: Any) -> TypeGuard[Trial]:
    """Return whether what a worker answered is a trial: counts of something, and times."""
    if not isinstance(trial, Trial):
        return False
    counts: tuple[Any, ...] = (trial.n_steps, trial.n_resets)
    times: tuple[Any, ...] = (trial.steps_s, trial.steps_wait_s, trial.resets_s)
    return all(type(n) is int and n > 0 for n in counts) and all(
        isinstance(t, float) and 0.0 <= t < math.inf for t in times
    )
