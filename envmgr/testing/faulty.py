"""An env that fails by a plan: with which fault, in which env, at which point of its life.

A plan is a sequence of `Fault`s, which can be pickled. The env is also a `LedgerEnv`, so that a
`Ledger` can tell whether everything around a fault is in order.
"""

from __future__ import annotations

import atexit
import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envmgr.testing.ledger_env import LedgerEnv
from envmgr.untrusted import opened_itself

_HANG_S = 600.0
"""The longest time of a hang that is meant to last for ever: if nobody ends it, it ends then."""


class FaultError(Exception):
    """The error that faulty envs raise."""


class TwoArgumentError(FaultError):
    """An exception that cannot be made anew from its text alone."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first}, {second}")


class StrangeError(FaultError):
    """An exception that can be neither printed nor pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise FaultError("no text")

    def __reduce__(self) -> Any:
        raise FaultError("no pickle")


class Unpicklable:
    """An object that refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise FaultError("this cannot be pickled")


# -- what ends or stops a process -----------------------------------------------------------------


def hang_holding_gil(limit_s: float = _HANG_S) -> None:
    """Hang in C: no other thread of this process gets to run, and no signal is heeded.

    It is ended only by signals that cannot be blocked (SIGKILL, SIGSTOP) and, with exit code 70, by
    its limit.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(int(limit_s))
    os._exit(70)


def segfault() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def worker_channel() -> Any:
    """Return the connection to its manager of the worker process that this code runs in.

    Returns:
        A `FrameChannel`; None outside of worker processes, and outside of their main thread.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "run_worker":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get("channel")


def write_garbage() -> None:
    """Write something that is not a message into this worker's connection to its manager.

    Raises:
        FaultError: this is not a worker process.
    """
    channel = worker_channel()
    if channel is None:
        raise FaultError("there is no connection to a manager here: this is not a worker process")
    os.write(channel.fds[-1], b"this is not a frame: " + bytes(range(256)))


def _raise_local_class(_: Any) -> None:
    class LocalError(FaultError):
        """An exception whose class cannot be found by name."""

    raise LocalError("of a local class")


def _raise(error: Callable[[], BaseException]) -> Callable[[Any], None]:
    def fault(_: Any) -> None:
        raise error()

    return fault


def _signal(name: str) -> Callable[[Any], None]:
    def fault(_: Any) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    return fault


def _hang(argument: Any) -> None:
    time.sleep(_HANG_S if argument is None else float(argument))


def _fork_child(argument: Any) -> None:
    """Start a process that outlives this one, unless somebody ends it."""
    subprocess.Popen(  # noqa: S603 - our own interpreter
        [
            sys.executable,
            "-c",
            f"import time; time.sleep({_HANG_S if argument is None else argument})",
        ]
    )


def _print_at_exit(_: Any) -> None:
    """Print when the interpreter ends, and from a thread until then."""
    atexit.register(print, "printed after close")

    def chatter() -> None:
        while True:
            print("printed by a thread")
            time.sleep(0.01)

    threading.Thread(target=chatter, daemon=True).start()


def _close_streams(_: Any) -> None:
    for fd in (1, 2):
        os.close(fd)


_LEAKED: list[bytearray] = []


def _leak(argument: Any) -> None:
    _LEAKED.append(bytearray(b"\1" * (10_000_000 if argument is None else int(argument))))


_DEEDS: Mapping[str, Callable[[Any], None]] = {
    "raise": _raise(lambda: FaultError("scripted")),
    "raise_two_arguments": _raise(lambda: TwoArgumentError("scripted", 2)),
    "raise_local_class": _raise_local_class,
    "raise_strange": _raise(StrangeError),
    "keyboard_interrupt": _raise(KeyboardInterrupt),
    "sys_exit": lambda code: sys.exit(3 if code is None else code),
    "os_exit": lambda code: os._exit(7 if code is None else int(code)),
    "kill": _signal("SIGKILL"),
    "segfault": lambda _: segfault(),
    "abort": _signal("SIGABRT"),
    "bus_error": _signal("SIGBUS"),
    "stop": _signal("SIGSTOP"),
    "hang": _hang,
    "hang_holding_gil": lambda limit: hang_holding_gil(_HANG_S if limit is None else limit),
    "slow": lambda seconds: time.sleep(0.05 if seconds is None else float(seconds)),
    "leak": _leak,
    "fork_child": _fork_child,
    "print_after_close": _print_at_exit,
    "close_streams": _close_streams,
    "garbage": lambda _: write_garbage(),
}
"""What faults do, by kind; those that spoil a result instead are in `_SPOILED`."""


# -- what is wrong with a result ------------------------------------------------------------------

_Result = tuple[Any, Any, bool, bool, Any]


def _with_obs(change: Callable[[Any], Any]) -> Callable[[_Result], Any]:
    return lambda result: (change(result[0]), *result[1:])


def _with_reward(reward: Any) -> Callable[[_Result], Any]:
    return lambda result: (result[0], reward, *result[2:])


def _with_info(change: Callable[[Any], Any]) -> Callable[[_Result], Any]:
    return lambda result: (*result[:4], change(result[4]))


_SPOILED: Mapping[str, Callable[[_Result], Any]] = {
    "wrong_shape": _with_obs(lambda obs: np.zeros(obs.shape[0] + 1, obs.dtype)),
    "wrong_dtype": _with_obs(lambda obs: obs.astype(np.complex128)),
    "wrong_structure": _with_obs(lambda obs: {"obs": obs}),
    "no_observation": _with_obs(lambda obs: None),
    "nan_observation": _with_obs(lambda obs: np.full(obs.shape, np.nan)),
    "infinite_observation": _with_obs(lambda obs: np.full(obs.shape, np.inf)),
    "nan_reward": _with_reward(float("nan")),
    "infinite_reward": _with_reward(float("inf")),
    "array_reward": _with_reward(np.zeros(3)),
    "text_reward": _with_reward("much"),
    "no_reward": _with_reward(None),
    "no_info": _with_info(lambda info: None),
    "list_info": _with_info(lambda info: [("not", "a dict")]),
    "unpicklable_info": _with_info(lambda info: {**info, "thing": Unpicklable()}),
    "huge_info": _with_info(lambda info: {**info, "thing": np.zeros(6_000_000, np.uint8)}),
    "abnormal": _with_info(lambda info: {**info, "abnormal": True}),
    "not_a_timestep": lambda result: "nonsense",
}

KINDS = tuple(sorted((*_DEEDS, *_SPOILED)))
"""All kinds of faults."""

WHERE = ("construction", "reset", "step", "close")
"""Where they may happen; results are spoilt in steps, and in resets their observations."""


@dataclass(frozen=True)
class Fault:
    """One fault, and when it happens. Conditions that are None match anything.

    Attributes:
        kind: one of `KINDS`.
        where: one of `WHERE`.
        env_id: the env in which it happens.
        episode: the episode of the env object, counted from 0.
        step: the step of the episode, counted from 1.
        build: which object of this env_id, counted from 0; needs the `folder` of `FaultyEnv`.
        argument: exit code, seconds or bytes, for kinds that take one.
    """

    kind: str
    where: str = "step"
    env_id: int | None = None
    episode: int | None = None
    step: int | None = None
    build: int | None = None
    argument: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.where not in WHERE:
            raise ValueError(
                f"there is no fault {self.kind!r} in {self.where!r}; kinds are {', '.join(KINDS)}, "
                f"places {', '.join(WHERE)}"
            )

    def is_due(self, where: str, now: Mapping[str, int | None]) -> bool:
        """Return whether the fault happens at a place and time."""
        if where != self.where:
            return False
        return all(getattr(self, name) in (None, value) for name, value in now.items())


class FaultyEnv(LedgerEnv):
    """A `LedgerEnv` that fails as its plan says.

    Args:
        env_id: the id that the env has in its manager.
        plan: the faults; if several are due together, the first one happens.
        folder: where builds are counted, in a file for each env_id; needed for `Fault.build`.
        **options: options of `LedgerEnv`; `dtype` is float64 here, so that observations can be NaN.

    Raises:
        TypeError: `env_id` is not an integer.
    """

    def __init__(
        self, env_id: int, plan: Sequence[Fault] = (), *, folder: str | None = None, **options: Any
    ) -> None:
        env_id = operator.index(env_id)  # a text would lead the file of `folder` out of it
        super().__init__(env_id, **{"dtype": np.float64, **options})
        self._plan = tuple(plan)
        self.build = None if folder is None else _count_build(folder, env_id)
        self._suffer("construction")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, or fail."""
        obs, info = super().reset(seed=seed, options=options)
        spoil = self._suffer("reset")
        if spoil is None:
            return obs, info
        result = spoil((obs, 0.0, False, False, info))
        return result if isinstance(result, str) else (result[0], result[4])

    def step(self, action: int) -> Any:
        """Take a step, or fail."""
        result = super().step(action)
        spoil = self._suffer("step")
        return result if spoil is None else spoil(result)

    def close(self) -> None:
        """Close, or fail."""
        self._suffer("close")

    def _suffer(self, where: str) -> Callable[[_Result], Any] | None:
        """Carry out the fault that is due here, or return the function that spoils the result."""
        signer = self.signer
        now = {
            "env_id": self.env_id,
            "episode": signer.episode,
            "step": signer.step,
            "build": self.build,
        }
        fault = next((fault for fault in self._plan if fault.is_due(where, now)), None)
        if fault is None:
            return None
        deed = _DEEDS.get(fault.kind)
        if deed is None:
            return _SPOILED[fault.kind]
        deed(fault.argument)
        return None


def _count_build(folder: str, env_id: int) -> int:
    """Return how many envs of this id were built in this folder before, and count this one."""
    path = os.path.join(folder, f"builds-of-env-{env_id}")
    with open(path, "ab", buffering=0, opener=opened_itself) as file:
        file.write(b".")
        return os.fstat(file.fileno()).st_size - 1
