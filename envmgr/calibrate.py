"""`num_workers: auto`: how many workers share the envs, found by trying one env in a worker.

The trial measures what an env does, and what it costs to wake a worker, which differs between
machines by a factor of a hundred. Its worker is of the same kind as the real ones and ends before
the first of them starts.
docs/decisions/0010-calibration.md gives the reasons for the rule.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from envmgr.config import ManagerConfig
from envmgr.core import Phase, Supervisor
from envmgr.core.engine import Engine
from envmgr.core.launching import await_all, build_all, reset_all
from envmgr.core.submit import submit_calls
from envmgr.errors import ConfigError, EnvFailure, LaunchError
from envmgr.launch import cores_of
from envmgr.texts import counted, short_time
from envmgr.wire.messages import Op
from envmgr.worker.profiling import Trial, try_env

logger = logging.getLogger("envmgr")

STEPPING_S = 0.3
"""How long the env is stepped."""

PATIENCE_S = 5.0
"""How long the first reset may take, and whatever hangs while the env is stepped; shorter time
limits of the config apply here, too."""

RESETS_S = 0.5
"""How long resets after the first may take in any case."""

ROUND_TRIPS, LEAST_TRIPS, WAKING_S = 100, 10, 0.02
"""How often the worker is woken, and how often at the least if more would take over `WAKING_S`."""

LATE_S = 5e-3
"""An answer that takes longer is not waited for and does not count: something else takes the core,
or the answer has come together with something else."""

BATCH_S = 30e-6
"""The time that a worker computes for a batch of its own besides the steps and the wake-up, in
Python that runs with cold caches. It was measured: see the decision named above."""

COSTLY_STEP_S = 2e-3
"""Steps that take longer gain little from sharing, and the system can balance them."""


class WakeUp(NamedTuple):
    """The cost of having a sleeping worker do something and report back.

    The time that a wake-up takes and its CPU time are far apart where idle cores wake up slowly, as
    in many virtual machines. A wake-up delays a batch by the time that it takes. But with more
    workers than cores, the cores are not idle, and each wake-up costs its CPU time.

    Attributes:
        round_trip_s: seconds from ringing for a worker to its answer; both sides slept before.
        cpu_s: CPU time that the two sides spend on it, in seconds.
    """

    round_trip_s: float
    cpu_s: float


TYPICAL = WakeUp(45e-6, 20e-6)
"""The wake-up of an ordinary machine, used where there are no doorbells to measure one with."""


class Choice(NamedTuple):
    """A number of workers, and the reason for it."""

    num_workers: int
    reason: str


@dataclass(frozen=True)
class Calibration:
    """The number that `num_workers: auto` became, and the figures behind it.

    Attributes:
        usable_cores: number of cores that workers may run on.
        choice: how many workers, and why.
        construction_s: seconds from the start of the process until the env was built; None if it
            never was.
        trial: what was measured; None if the env could not be tried out.
        wake_up: what waking a worker costs; None if that was not measured.
    """

    env_num: int
    usable_cores: int
    choice: Choice
    construction_s: float | None = None
    trial: Trial | None = None
    wake_up: WakeUp | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, times in seconds; for `stats()`."""
        trial, wake_up = self.trial, self.wake_up
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
            "wake_up_s": None if wake_up is None else wake_up.round_trip_s,
            "wake_up_cpu_s": None if wake_up is None else wake_up.cpu_s,
        }

    def __str__(self) -> str:
        n = self.choice.num_workers
        workers = "one worker per env" if n == self.env_num else f"{n} worker{'s' * (n > 1)}"
        text = (
            f"num_workers: auto: {workers} for {counted(self.env_num, 'env')} on "
            f"{counted(self.usable_cores, 'usable core')}: {self.choice.reason}"
        )
        if self.trial is None or self.construction_s is None:
            return text
        trial, woken = self.trial, "waking a worker was not measured"
        if self.wake_up is not None:
            round_trip_s, cpu_s = map(short_time, self.wake_up)
            woken = f"waking a worker takes {round_trip_s}, and {cpu_s} of CPU time"
        return (
            f"{text} (a step takes {short_time(trial.step_s)}, of which it waits "
            f"{short_time(trial.step_wait_s)}; a reset {short_time(trial.reset_s)}; measured over "
            f"{counted(trial.n_steps, 'step')} and {counted(trial.n_episodes, 'episode')}; "
            f"{woken}; built in "
            f"{short_time(self.construction_s)})"
        )


def choose(env_num: int, usable_cores: int, trial: Trial, wake_up: WakeUp) -> Choice:
    """Decide how many workers share the envs.

    Sharing a worker saves a wake-up per step. It costs the time in which one env keeps a core idle
    that its neighbours could use: while it waits, and while the others wait for its reset. Envs
    share workers if this costs less than it saves.

    Args:
        env_num: number of envs.
        usable_cores: number of cores that workers may run on.
        trial: what was measured of one env.
        wake_up: what waking a worker costs.
    """
    step_s, saved_s = trial.step_s, wake_up.cpu_s + BATCH_S
    if step_s > COSTLY_STEP_S:
        return Choice(env_num, f"a step takes so long that {short_time(saved_s)} do not matter")
    # Each worker's work in a batch should take at least as long as getting the worker to begin.
    worth = env_num * step_s / (wake_up.round_trip_s + BATCH_S)
    n = max(1, min(env_num, usable_cores, int(worth)))
    if n == env_num:
        return Choice(n, "there is a core for each env")
    costs_s = {
        "its steps wait": trial.step_wait_s,
        "its resets would keep neighbours waiting": trial.reset_s_per_step,
    }
    cost_s = sum(costs_s.values())
    if cost_s > saved_s:
        reason = max(costs_s, key=lambda name: costs_s[name])
        return Choice(env_num, f"{reason}: sharing would cost {short_time(cost_s)} per step")
    saved = f"sharing saves about {short_time(saved_s)} per step and costs {short_time(cost_s)}"
    # More workers gain less than it takes to wake them, and one worker gains nothing over none.
    base = "; without isolation, `type: base` would be faster" if n == 1 else ""
    return Choice(n, f"its steps are cheap and need a core: {saved}{base}")


def trial_config_of(config: ManagerConfig) -> ManagerConfig:
    """Return the config of an engine whose one env is tried out; `try_out` sets the time limits."""
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
    """The number that a manager's `num_workers: auto` becomes, found before its first launch.

    The number holds for later launches, too; if env 0 could not be tried out, the next launch tries
    again.

    Args:
        asked: the config of the manager, as it was given.
        env_num: number of the manager's envs.
        packs_envs: whether one of its workers can have several envs.

    Raises:
        ConfigError: the config has a limit that trying an env out would exceed.

    Attributes:
        asked: see above.
        calibration: what was found; None as long as nothing was found.
    """

    def __init__(self, asked: ManagerConfig, env_num: int, *, packs_envs: bool) -> None:
        self.asked = asked
        self.calibration: Calibration | None = None
        self._env_num = env_num
        self._is_auto = asked.num_workers == "auto" and packs_envs and env_num > 1
        if self._is_auto and asked.limits is not None and asked.limits.starts_per_s:
            raise ConfigError(
                "manager.num_workers is auto, which resets env 0 as often as it can for a moment, "
                f"but manager.limits.starts_per_s is {asked.limits.starts_per_s:g}. Give a number."
            )
        self._trials: list[Engine] = []

    @property
    def is_open(self) -> bool:
        """Whether the number of workers has yet to be found."""
        return self._is_auto and (self.calibration is None or self.calibration.trial is None)

    def find(
        self,
        open_trial: Callable[[ManagerConfig, Callable[[Engine], None]], None],
        prepare: Callable[[Supervisor], None],
    ) -> ManagerConfig:
        """Try env 0 out.

        Args:
            open_trial: opens an engine for the env with a config, and passes the engine to a
                function that keeps it; see `open_engine`.
            prepare: gives the env the params and the seed of its first reset.

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
        """Return the config to launch with, given what was found."""
        return replace(self.asked, num_workers=found.choice.num_workers)

    def _end_all(self) -> None:
        self.stop()
        self._trials.clear()

    def stop(self) -> None:
        """End a trial that is under way, perhaps in another thread."""
        for engine in self._trials.copy():
            engine.close(0.0)


def try_out(engine: Engine, config: ManagerConfig, env_num: int, cores: int) -> Calibration:
    """Try the one env of an engine out, decide how many workers share the envs, and log that.

    An env that fails is not reported here: each env gets a worker of its own, and the launch that
    follows says what is wrong. The caller holds the engine's lock. Afterwards the engine is of no
    other use.

    Args:
        engine: see `trial_config_of`.
        config: the config of the manager.
        env_num: number of the manager's envs.
        cores: number of cores that its workers may run on.

    Raises:
        ConfigError: the factory cannot be sent to a worker.
        ManagerClosedError: the engine was closed.
    """
    construction_s = trial = wake_up = None
    engine.supervisor.repair.quiet = True
    began = engine.now()
    try:
        build_all(engine)
        construction_s = engine.now() - began
        if engine.supervisor.descriptions[0].is_async:
            n = min(env_num, cores)
            choice = Choice(
                n, "the envs, or what builds them, are async: those of a worker wait at one time"
            )
            return _logged(Calibration(env_num, cores, choice, construction_s))
        wake_up = measure_wake_up(engine)  # before there are steps: it sleeps at once
        engine.supervisor.place_observations(same_spaces=True)
        trial = _measure(engine, config)
    except LaunchError as error:
        reason, *_ = str(error.failures.get(0, error)).splitlines()
        choice = Choice(env_num, f"an env could not be tried out: {reason}")
    else:
        choice = choose(env_num, cores, trial, wake_up or TYPICAL)
    return _logged(Calibration(env_num, cores, choice, construction_s, trial, wake_up))


def _logged(calibration: Calibration) -> Calibration:
    logger.info("%s", calibration)
    return calibration


def measure_wake_up(engine: Engine, cpu_s: Callable[[], float] = time.thread_time) -> WakeUp | None:
    """Measure what it costs to wake the worker of an engine that has built its env.

    The worker is rung for and rings back, as for a batch of steps. The quickest quarter of the
    round trips counts: in the others, on a busy machine, either side may have had to wait for a
    core. Both sides do the same, so this thread's CPU time is half of the total. The caller holds
    the engine's lock.

    Args:
        engine: an engine with one worker, which sleeps until it is rung for.
        cpu_s: returns the seconds of CPU time that this thread has used.

    Returns:
        The cost; None where workers are not rung for, or do not answer.
    """
    transport, now = engine.transport, engine.now
    if not transport.has_block:
        return None
    hosts = [env.host_id for env in engine.supervisor.envs if env.host_id is not None]
    trips: list[WakeUp] = []
    end: float | None = None  # not before the first answer: until then it starts
    try:
        for _ in range(2 * ROUND_TRIPS):
            began, cpu_before_s = now(), cpu_s()
            transport.ring(hosts, asks=True)
            if not transport.await_ring(LATE_S):
                engine.collect()
            elif end is None:
                end = now() + WAKING_S
            else:
                trips.append(WakeUp(now() - began, 2.0 * (cpu_s() - cpu_before_s)))
            is_over = end is not None and now() >= end
            if len(trips) == ROUND_TRIPS or (is_over and len(trips) >= LEAST_TRIPS):
                break
    except (OSError, ValueError):  # a signal handler has closed it in the middle of this
        if not engine.closing:
            raise
    if not trips:
        return None
    return WakeUp(*(sorted(figures)[len(trips) // 4] for figures in zip(*trips, strict=True)))


def _measure(engine: Engine, config: ManagerConfig) -> Trial:
    step_s, reset_s = config.step_timeout or PATIENCE_S, config.reset_timeout or PATIENCE_S
    began = engine.now()
    reset_all(engine, min(reset_s, PATIENCE_S))
    # Later resets may take longer than the first. But where only steps have a limit, an env that
    # hangs must not be waited for as long as a reset might take.
    reset_s = min(reset_s, max(RESETS_S, 4.0 * (engine.now() - began)))
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
    """Return whether a worker's answer is a trial: with counts above 0, and finite times."""
    if not isinstance(trial, Trial):
        return False
    counts: tuple[Any, ...] = (trial.n_steps, trial.n_resets)
    times: tuple[Any, ...] = (trial.steps_s, trial.steps_wait_s, trial.resets_s)
    return all(type(n) is int and n > 0 for n in counts) and all(
        isinstance(t, float) and 0.0 <= t < math.inf for t in times
    )
