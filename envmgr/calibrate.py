"""`num_workers: auto`: how many workers share the envs, found by trying one env in a worker.

The worker is of the same kind as the real ones and ends before the first of them starts.
docs/decisions/0010-calibration.md says why the rule is as it is.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from envmgr.core import EnvSlot, Work, failures
from envmgr.core.payloads import MalformedReplyError, failure_of
from envmgr.errors import ManagerClosedError
from envmgr.policy import Deadlines
from envmgr.transport.base import Arrival, Garbage, HostDied, Transport
from envmgr.types import Clock
from envmgr.wire.frames import FrameError
from envmgr.wire.hosts import HostSpec
from envmgr.wire.messages import Message, Op, RemoteFailure, ResetOrder
from envmgr.worker.trial import Trial

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
            f"{text} (a step takes {_shown(trial.step_s)}, of which it waits "
            f"{_shown(trial.step_wait_s)}; a reset {_shown(trial.reset_s)}; measured over "
            f"{trial.n_steps} steps and {trial.n_episodes} episodes; built in "
            f"{_shown(self.construction_s)})"
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
        return Choice(env_num, f"a step takes so long that {_shown(WAKE_UP_S)} do not matter")
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
        return Choice(env_num, f"{reason}: sharing would cost {_shown(cost_s)} per step")
    saved = f"sharing saves about {_shown(WAKE_UP_S)} per step and costs {_shown(cost_s)}"
    return Choice(n, f"its steps are cheap and need a core: {saved}")


def usable_cores(affinity: tuple[tuple[int, ...], ...] | None) -> int:
    """Return on how many cores workers may run.

    Args:
        affinity: the cores of each worker, by its index; None: those of this process.
    """
    if affinity is not None:
        return len({core for cores in affinity for core in cores})
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Calibrator:
    """Tries an env out in a worker of its own.

    Args:
        transport: starts the worker; closed at the end of `run`.
        spec: the worker, with one env.
        order: the env's first reset.
        deadlines: time limits.
        clock: monotonic seconds.
        env_num: number of envs.
        usable_cores: cores that workers may run on.
    """

    def __init__(
        self,
        transport: Transport,
        spec: HostSpec,
        order: ResetOrder,
        deadlines: Deadlines,
        clock: Clock,
        env_num: int,
        usable_cores: int,
    ) -> None:
        self._transport = transport
        self._spec = spec
        self._order = order
        self._deadlines = deadlines
        self._clock = clock
        self._env_num = env_num
        self._usable_cores = usable_cores
        self._cancelled = False
        self._slot = EnvSlot(spec.envs[0].env_id)
        self._slot.host_id = spec.host_id
        self._slot.request_id = spec.envs[0].request_id

    def run(self) -> Calibration:
        """Try the env, end its worker, decide, and log it.

        An env that fails is not reported here: each gets a worker of its own, and the launch that
        follows says what is wrong.

        Raises:
            ConfigError: the factory cannot be sent to a worker.
            ManagerClosedError: `cancel` was called.
        """
        env_num, cores = self._env_num, self._usable_cores
        construction_s = trial = None
        grace_s = 0.0
        try:
            construction_s = self._build()
            trial = self._measure()
            grace_s = self._deadlines.close_s
        except _TrialFailedError as error:
            choice = Choice(env_num, f"an env could not be tried out: {error}")
        else:
            choice = choose(env_num, cores, trial)
        finally:
            self._transport.close(grace_s)
        calibration = Calibration(env_num, cores, choice, construction_s, trial)
        logger.info("%s", calibration)
        return calibration

    def cancel(self) -> None:
        """Have `run` raise ManagerClosedError soon; from any thread, or a signal handler."""
        self._cancelled = True
        self._transport.wake()

    def _build(self) -> float:
        """Start the worker; return how long it took until the env was built."""
        began = self._clock()
        self._slot.work = Work.STARTING
        self._transport.start([self._spec])
        self._await(Op.HELLO, self._deadlines.connect_s)
        return self._clock() - began

    def _measure(self) -> Trial:
        limits = (self._deadlines.step_s, self._deadlines.reset_s)
        step_s, reset_s = (PATIENCE_S if limit is None else limit for limit in limits)
        self._ask(Op.RESET, self._order, Work.RESETTING)
        self._await(Op.RESET_DONE, min(reset_s, PATIENCE_S))
        self._ask(Op.CALIBRATE, STEPPING_S, Work.STEPPING)
        # The first step and its reset, the last ones, and the time between them.
        trial = self._await(
            Op.RESULT, min(STEPPING_S + 2.0 * (step_s + reset_s), STEPPING_S + PATIENCE_S)
        )
        if not isinstance(trial, Trial) or not _is_sound(trial):
            raise _TrialFailedError("its worker answered with something else than a trial")
        return trial

    def _ask(self, op: Op, payload: Any, work: Work) -> None:
        slot = self._slot
        slot.work = work
        slot.request_id += 1
        host_id = self._spec.host_id
        message = Message(op, slot.env_id, slot.generation, slot.request_id, payload)
        try:
            self._transport.send(host_id, self._transport.prepare(host_id, message))
        except FrameError as error:
            raise _TrialFailedError(f"what its reset is given cannot be sent: {error}") from error

    def _await(self, op: Op, limit_s: float) -> Any:
        """Return the payload of the reply to the latest request."""
        end = self._clock() + limit_s
        while True:
            if self._cancelled:
                raise ManagerClosedError("the manager was closed during this call")
            remaining_s = end - self._clock()
            if remaining_s <= 0.0:
                raise _TrialFailedError(f"it has not answered {limit_s:g} s into {self._doing}")
            for _, arrival in self._transport.poll(remaining_s):
                if isinstance(arrival, Message):
                    if arrival.request_id != self._slot.request_id:
                        continue
                    if arrival.op == op:
                        return arrival.payload
                self._refuse_failure(arrival)

    @property
    def _doing(self) -> str:
        return "its steps" if self._slot.work is Work.STEPPING else f"its {self._slot.work.value}"

    def _refuse_failure(self, arrival: Arrival) -> None:
        """Raise if an arrival says that the env or its worker has failed."""
        slot = self._slot
        if isinstance(arrival, HostDied):
            error: Exception = failures.crash(slot, arrival)
        elif isinstance(arrival, Garbage):
            error = failures.protocol(slot, arrival.reason)
        elif isinstance(arrival, Message) and isinstance(arrival.payload, RemoteFailure):
            try:
                error = failures.reported(slot, failure_of(arrival.payload))
            except MalformedReplyError as malformed:
                error = failures.protocol(slot, str(malformed))
        else:
            return
        raise _TrialFailedError(str(error).partition("\n")[0])


class _TrialFailedError(Exception):
    """An env could not be tried out. The text says why."""


def _is_sound(trial: Trial) -> bool:
    """Whether a worker's trial can be one: counts of something, and times."""
    counts: tuple[Any, ...] = (trial.n_steps, trial.n_resets)
    times: tuple[Any, ...] = (trial.steps_s, trial.steps_wait_s, trial.resets_s)
    return all(type(n) is int and n > 0 for n in counts) and all(
        isinstance(t, float) and 0.0 <= t < math.inf for t in times
    )


def _shown(seconds: float) -> str:
    """Return a time as text: three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
