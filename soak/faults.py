"""The faults of the scoreboard, and the env that has them.

Every library runs the same env class. Observations say which env made them, in which process, at
which step and after which action, so that whatever is delivered can be checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import gymnasium
import numpy as np

ENV_NUM = 3
VICTIM = 1
"""The env that has the fault; its number must come up in an error that names the env."""

FAULT_ACTION = 9_999
"""The action at which the fault happens, once: envs built later never get it again."""
END_ACTION = 9_998
"""The action that ends an episode, so that a reset follows."""
SLOW_ACTION = 9_997
"""The action whose step takes SLOW_S."""
SLOW_S = 1.5

ENV_ID, PID, STEPS, ACTION = range(4)
"""The indices of the numbers in an observation."""
NO_ACTION = -1.0

_GARBAGE = b"garbage!" * 8
_HANGS_IN_C = "hangs in a step in C, holding the GIL, SIGTERM ignored"


class Fault(NamedTuple):
    """One line of the scoreboard.

    Attributes:
        name: its name on the command line and in the JSON.
        title: what happens, for the table.
        where: when it happens: in a step, in a reset, while the env is built, while nothing is
            under way (from outside), in `close`, or `trainer`: something happens to the trainer.
        users: who steps the envs: `threads` or `coroutines` that have one each; empty for one
            caller of all.
        same: the name of the line whose fault happens here too; empty if this line has its own.
    """

    name: str
    title: str
    where: str
    users: str = ""
    same: str = ""


def _of_user(user: str) -> tuple[Fault, ...]:
    """Return the faults of an env with a user of its own, while other users have the other envs."""
    title, users = f"with a {user} of its own: ", f"{user}s"
    return (
        Fault(f"{user}-crash", f"{title}segmentation fault in a step", "step", users, "segfault"),
        Fault(f"{user}-hang", f"{title}{_HANGS_IN_C}", "step", users, "hang-gil"),
        Fault(f"{user}-kill", f"{title}SIGKILL between two steps", "idle", users),
    )


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-step", "SIGKILL in the middle of a step", "step"),
        Fault("kill-idle", "SIGKILL while nothing is under way", "idle"),
        Fault("kill-reset", "SIGKILL in a reset", "reset"),
        Fault("segfault", "segmentation fault in a step", "step"),
        Fault("exit-0", "`os._exit(0)` in a step", "step"),
        Fault("sys-exit", "`sys.exit()` in a step", "step"),
        Fault("child-survives", "dies, and a child that it forked goes on", "step"),
        Fault("raise-step", "raises in a step", "step"),
        Fault("raise-reset", "raises in a reset, once", "reset"),
        Fault("raise-build", "raises while it is built", "build"),
        Fault("die-build", "dies while it is built", "build"),
        Fault("local-exception", "raises an exception of a class that cannot be pickled", "step"),
        Fault("two-arguments", "raises an exception whose class takes two arguments", "step"),
        Fault("unpicklable-info", "returns an info that cannot be pickled", "step"),
        Fault("wrong-shape", "returns an observation of the wrong shape", "step"),
        Fault("none", "returns None as its observation", "step"),
        Fault("nan", "returns NaN", "step"),
        Fault("garbage", "writes garbage into every pipe and socket of its process", "step"),
        Fault("hang-step", "hangs in a step", "step"),
        Fault("hang-gil", _HANGS_IN_C, "step"),
        Fault("hang-reset", "hangs in a reset", "reset"),
        Fault("stop", "is stopped by SIGSTOP in a step", "step"),
        Fault("hang-close", "hangs in `close`", "close"),
        Fault("close-twice", "`close()` is called twice", "trainer"),
        Fault("ctrl-c", "Ctrl-C in the terminal while envs step", "trainer"),
        Fault("trainer-killed", "the trainer is killed with -9 while an env hangs", "trainer"),
        Fault("dropped", "the trainer drops the envs without `close()`", "trainer"),
        Fault("exit-open", "the trainer ends without `close()`", "trainer"),
        *_of_user("thread"),
        *_of_user("coroutine"),
    )
}


class TwoArgumentsError(Exception):
    """An exception that cannot be built from its text."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class FaultyEnv(gymnasium.Env[np.ndarray, int]):
    """An env that counts its steps; the victim has one fault, once.

    Args:
        env_id: its number.
        fault: the name of its fault.
        trainer_pid: the trainer's process, in which some libraries build an env to ask for spaces.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, env_id: int, fault: str, trainer_pid: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(10_000)
        self._env_id = env_id
        self._fault = fault if env_id == VICTIM else ""
        self._reset_fault_due = False
        self._steps = 0
        in_worker = os.getpid() != trainer_pid
        if self._fault == "raise-build" and in_worker:
            raise RuntimeError("the simulator is not installed")
        if self._fault == "die-build" and in_worker:
            os._exit(1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        if self._reset_fault_due:
            self._reset_fault_due = False
            _HAPPENINGS[self._fault]()
        return self._observe(NO_ACTION), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step; the reward is the action."""
        action = int(action)
        self._steps += 1
        obs: Any = self._observe(action)
        info: dict[str, Any] = {}
        if action == SLOW_ACTION:
            time.sleep(SLOW_S)
        elif action == END_ACTION:
            self._reset_fault_due = self._fault in _IN_RESET
            return obs, float(action), True, False, info
        elif action == FAULT_ACTION and self._fault:
            obs, info = self._have_fault(obs, info)
        return obs, float(action), False, False, info

    def close(self) -> None:
        """Close the env; one of the faults happens here."""
        if self._fault == "hang-close":
            hang()

    def _observe(self, action: float) -> np.ndarray:
        return np.array([self._env_id, os.getpid(), self._steps, action], np.float64)

    def _have_fault(self, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._fault == "wrong-shape":
            return obs[-1:], info
        if self._fault == "none":
            return None, info
        if self._fault == "nan":
            return np.full_like(obs, np.nan), info
        if self._fault == "unpicklable-info":
            return obs, {"lock": threading.Lock()}
        _HAPPENINGS[self._fault]()
        return obs, info


def factories(fault: str) -> list[Callable[[], FaultyEnv]]:
    """Return the functions that build the envs of one run."""
    name = FAULTS[fault].same or fault
    return [partial(FaultyEnv, env_id, name, os.getpid()) for env_id in range(ENV_NUM)]


# -- what happens ---------------------------------------------------------------------------------


def hang() -> NoReturn:
    """Hang in Python."""
    while True:
        time.sleep(3600)


def _hang_holding_the_gil() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        ctypes.PyDLL(None).sleep(3600)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> NoReturn:
    raise RuntimeError("the simulator is gone")


def _raise_local() -> NoReturn:
    class LocalError(Exception):
        pass

    raise LocalError("the simulator is gone")


def _raise_with_two_arguments() -> NoReturn:
    raise TwoArgumentsError("the simulator is gone", "its step")


def _leave_a_child() -> None:
    if os.fork() == 0:
        hang()
    _kill()


def _write_garbage() -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if fd > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.write(fd, _GARBAGE)


_HAPPENINGS: dict[str, Callable[[], Any]] = {
    "kill-step": _kill,
    "kill-reset": _kill,
    "segfault": faulthandler._sigsegv,  # type: ignore[attr-defined]
    "exit-0": lambda: os._exit(0),
    "sys-exit": sys.exit,
    "child-survives": _leave_a_child,
    "raise-step": _raise,
    "raise-reset": _raise,
    "local-exception": _raise_local,
    "two-arguments": _raise_with_two_arguments,
    "garbage": _write_garbage,
    "hang-step": hang,
    "hang-gil": _hang_holding_the_gil,
    "hang-reset": hang,
    "stop": _stop,
    "trainer-killed": hang,
}
_IN_RESET = frozenset(name for name, fault in FAULTS.items() if fault.where == "reset")
