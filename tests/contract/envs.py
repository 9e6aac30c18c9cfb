"""Scripted envs: what they do is said by their actions, and what they return says who they are.

Every observation, reward and info names the env_id, the build (how many envs of this env_id were
built before), the episode and the step, so that whatever is lost, repeated or mixed up shows. What
an env was made to do is also written down in its journal, one file for each env_id, which survives
the process: so a test can tell what was executed from what was reported.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep

N_MOVES = 10
"""Actions below this one do nothing but show up in the observation."""


class Do(IntEnum):
    """Actions that make a scripted env do something else than move."""

    END = 10
    TRUNCATE = 11
    RAISE = 12
    SYS_EXIT = 13
    OS_EXIT = 14
    KILL = 15
    HANG = 16
    """Visit the gate, then never return."""
    GATE = 17
    """Visit the gate and go on when released."""
    GATE_THEN_END = 18
    BAD_SHAPE = 19
    BAD_DTYPE = 20
    NO_OBSERVATION = 21
    NOT_A_TIMESTEP = 22
    UNPICKLABLE_INFO = 23
    HUGE_INFO = 24
    ABNORMAL = 25
    """Say so in the info, with the rest in order."""
    ABNORMAL_EMPTY = 26
    """Say so in the info, with neither observation nor reward."""
    ABNORMAL_LIST = 27
    """Say so in one of two infos of a list."""
    LIST_INFO = 28
    TUPLE_INFO = 29
    NAN_OBSERVATION = 30
    NAN_REWARD = 31
    NO_REWARD = 32
    GARBAGE = 33
    """Write bytes that are no message into the connection to the manager."""
    HANG_DEAF = 34
    """As HANG, and take no notice of SIGTERM."""
    END_THEN_GATE = 35
    """END; the next reset visits the gate."""
    END_THEN_RAISE = 36
    END_THEN_KILL = 37
    END_THEN_HANG = 38
    END_THEN_SYS_EXIT = 39
    JITTER = 40
    """Take a random short time."""
    END_LATE = 41
    """END after a random short time, and reset in a random short time."""
    STRANGE_ERROR = 42
    """Raise what can be neither printed nor pickled."""
    KEYBOARD_INTERRUPT = 43
    CASTABLE_DTYPE = 44
    """Return a float32 observation, which the space's float64 can hold."""
    ADD_TO_BUFFER = 45
    """Change the array that was returned before, which is the env's own business."""
    SEGV = 46
    ABORT = 47
    BUS = 48
    OS_EXIT_0 = 49
    TWO_ARGUMENT_ERROR = 50
    LOCAL_ERROR = 51
    HANG_IN_C = 52
    """Visit the gate, then never return from C code that holds the GIL, with SIGTERM blocked."""
    LATE = 53
    """Take about `late_s` seconds."""
    KILL_IN_PICKLE = 54
    EXIT_IN_PICKLE = 55
    ERROR_IN_UNPICKLE = 56
    EXIT_IN_UNPICKLE = 57
    BAD_STRUCTURE = 58
    INF_OBSERVATION = 59
    INF_REWARD = 60
    TEXT_REWARD = 61
    ARRAY_REWARD = 62
    """NaN in an array of rewards."""
    INFO_NOT_A_DICT = 63


_NEXT_RESET = {
    Do.END_THEN_GATE: "gate",
    Do.END_THEN_RAISE: "raise",
    Do.END_THEN_KILL: "kill",
    Do.END_THEN_HANG: "hang",
    Do.END_THEN_SYS_EXIT: "sys_exit",
    Do.END_LATE: "jitter",
}
_FAULTS = {
    Do.RAISE: "raise",
    Do.SYS_EXIT: "sys_exit",
    Do.OS_EXIT: "os_exit",
    Do.KILL: "kill",
    Do.HANG: "hang",
    Do.HANG_DEAF: "hang_deaf",
    Do.GATE: "gate",
    Do.GATE_THEN_END: "gate",
    Do.JITTER: "jitter",
    Do.END_LATE: "jitter",
    Do.STRANGE_ERROR: "strange_error",
    Do.KEYBOARD_INTERRUPT: "keyboard_interrupt",
    Do.GARBAGE: "garbage",
    Do.SEGV: "SIGSEGV",
    Do.ABORT: "SIGABRT",
    Do.BUS: "SIGBUS",
    Do.OS_EXIT_0: "os_exit_0",
    Do.TWO_ARGUMENT_ERROR: "two_argument_error",
    Do.LOCAL_ERROR: "local_error",
    Do.HANG_IN_C: "hang_in_c",
    Do.LATE: "late",
}
_ENDING = frozenset((Do.END, Do.TRUNCATE, Do.GATE_THEN_END, *_NEXT_RESET))


class Seen(NamedTuple):
    """What a scripted env's observation says."""

    env_id: int
    build: int
    episode: int
    step: int
    action: int
    draw: float


OBS_SPACE = Box(-np.inf, np.inf, (len(Seen._fields),), np.float64)


def seen(obs: Any) -> Seen:
    """Read an observation."""
    return Seen(*(int(x) for x in obs[:5]), float(obs[5]))


def expected_reward(obs: Any) -> float:
    """Return the reward that goes with an observation."""
    it = seen(obs)
    return it.env_id * 1e6 + it.episode * 1e3 + it.step


class ScriptedError(Exception):
    """What scripted envs raise."""


class StrangeError(Exception):
    """An error of the worst kind."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ScriptedError("no text")

    def __reduce__(self) -> Any:
        raise ScriptedError("no pickle")


class TwoArgumentError(Exception):
    """Cannot be made anew of its text, as most exceptions can."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Treacherous:
    """Does something to the process that pickles it, or to the one that unpickles it."""

    def __init__(self, what: Callable[..., Any], *args: Any, on_pickle: bool) -> None:
        self._what = what
        self._args = args
        self._on_pickle = on_pickle

    def __reduce__(self) -> Any:
        if self._on_pickle:
            self._what(*self._args)
        return self._what, self._args


def _fail_to_unpickle(*args: Any) -> Any:
    raise ScriptedError("this cannot be unpickled")


class Unpicklable:
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise ScriptedError("this cannot be pickled")


class Script:
    """What scripted envs of all styles have in common.

    Args:
        env_id: which env this is.
        folder: where journals are, and the gate.
        build_faults: what happens in the construction, by build.
        reset_faults: what happens in a reset, by number of the attempt, over all builds.
        close_fault: what happens in `close`.
        episode_length: steps after which an episode ends by itself.
        late_s: about how long LATE takes.
    """

    def __init__(
        self,
        env_id: int,
        folder: str,
        *,
        build_faults: Mapping[int, str] | None = None,
        reset_faults: Mapping[int, str] | None = None,
        close_fault: str | None = None,
        episode_length: float = float("inf"),
        late_s: float = 0.0,
    ) -> None:
        self.env_id = env_id
        self.folder = folder
        self.label = f"env-{env_id}"
        self.unique = uuid.uuid4().hex
        self.knob: Any = "factory"
        self.calls: list[Any] = []
        self._reset_faults = dict(reset_faults or {})
        self._close_fault = close_fault
        self._episode_length = episode_length
        self._late_s = late_s
        self._rng = np.random.default_rng()
        self._next_reset: str | None = None
        self._buffer = np.zeros(OBS_SPACE.shape, np.float64)  # one for all: who keeps it must copy
        self.episode = -1
        self.step_count = 0
        self.params: dict[str, Any] = {}
        before = read_journal(folder, env_id)
        self.build = sum(entry[0] == "build" for entry in before)
        self._attempt = sum(entry[0] == "reset" for entry in before)
        self.note("build", self.build, os.getpid())
        faults = build_faults or {}
        self.suffer(faults.get(self.build, faults.get(-1)), "build")

    def note(self, *entry: Any) -> None:
        """Write an entry into the journal."""
        with _opened(journal_path(self.folder, self.env_id), "ab") as file:
            file.write(json.dumps(entry, default=repr).encode() + b"\n")

    def reseed(self, seed: int) -> None:
        """Start the generator over."""
        self._rng = np.random.default_rng(seed)

    def begin(self, params: Mapping[str, Any], seed: int | None) -> np.ndarray:
        """Begin an episode."""
        attempt, self._attempt = self._attempt, self._attempt + 1
        self.note("reset", self.episode + 1, dict(params), seed)
        fault, self._next_reset = self._next_reset, None
        self.suffer(self._reset_faults.get(attempt, params.get("fault", fault)), "reset")
        if seed is not None:
            self.reseed(seed)
        self.params = dict(params)
        self.episode += 1
        self.step_count = 0
        return self.observation(-1)

    def observation(self, action: int) -> np.ndarray:
        """Return the present observation, in the buffer that is used every time."""
        self._buffer[:] = (
            self.env_id,
            self.build,
            self.episode,
            self.step_count,
            action,
            self._rng.random(),
        )
        return self._buffer

    def draws(self, *, listed: bool) -> Any:
        """Return the latest draw in a list or an array: infos with lists go by message.

        Small ones without go through the block. Which it is goes by the env_id, so that four envs
        have steps and resets of both kinds, each with each.
        """
        draw = float(self._buffer[5])
        return [draw] if listed else np.array([draw])

    def begun(self) -> dict[str, Any]:
        """Return what a reset says besides the observation."""
        draws = self.draws(listed=self.env_id & 2 != 0)
        return {"episode": self.episode, "params": dict(self.params), "draws": draws}

    def act(self, action: int) -> tuple[Any, Any, bool, bool, Any]:
        """Take a step and return `(obs, reward, terminated, truncated, info)`."""
        action = int(np.asarray(action).item())
        self.note("step", self.episode, self.step_count + 1, action)
        self.suffer(_FAULTS.get(action), "step")  # type: ignore[call-overload]
        self.step_count += 1
        obs: Any = self.observation(action)
        reward: Any = expected_reward(obs)
        terminated = action in _ENDING and action != Do.TRUNCATE
        terminated = terminated or self.step_count >= self._episode_length
        self._next_reset = _NEXT_RESET.get(action)  # type: ignore[call-overload]
        info: Any = {
            "env_id": self.env_id,
            "build": self.build,
            "episode": self.episode,
            "step": self.step_count,
            "action": action,
            "params": dict(self.params),
            "nested": {"draws": self.draws(listed=self.env_id & 1 == 0), "array": obs.copy()},
        }
        match action:
            case Do.BAD_SHAPE:
                obs = np.zeros(OBS_SPACE.shape[0] + 1)
            case Do.BAD_DTYPE:
                obs = obs.astype(np.complex128)
            case Do.CASTABLE_DTYPE:
                obs = obs.astype(np.float32)
            case Do.NO_OBSERVATION:
                obs = None
            case Do.NAN_OBSERVATION:
                obs[5] = np.nan
            case Do.NAN_REWARD:
                reward = float("nan")
            case Do.NO_REWARD:
                reward = None
            case Do.UNPICKLABLE_INFO:
                info["thing"] = Unpicklable()
            case Do.KILL_IN_PICKLE:
                info["thing"] = Treacherous(os.kill, os.getpid(), 9, on_pickle=True)
            case Do.EXIT_IN_PICKLE:
                info["thing"] = Treacherous(sys.exit, 5, on_pickle=True)
            case Do.ERROR_IN_UNPICKLE:
                info["thing"] = Treacherous(_fail_to_unpickle, on_pickle=False)
            case Do.EXIT_IN_UNPICKLE:
                info["thing"] = Treacherous(sys.exit, 5, on_pickle=False)
            case Do.BAD_STRUCTURE:
                obs = {"a": obs}
            case Do.INF_OBSERVATION:
                obs[5] = np.inf
            case Do.INF_REWARD:
                reward = float("-inf")
            case Do.TEXT_REWARD:
                reward = "much"
            case Do.ARRAY_REWARD:
                reward = np.array([1.0, np.nan])
            case Do.INFO_NOT_A_DICT:
                info = "fine"
            case Do.HUGE_INFO:
                info["thing"] = np.full(6_000_000, self.env_id, np.uint8)
            case Do.ABNORMAL:
                info["abnormal"] = True
            case Do.ABNORMAL_EMPTY:
                obs, reward, terminated, info = None, None, True, {"abnormal": True}
            case Do.ABNORMAL_LIST:
                info = [{"agent": 0}, {"agent": 1, "abnormal": True}]
            case Do.LIST_INFO:
                info = [{"agent": 0, **info}, {"agent": 1}]
            case Do.TUPLE_INFO:
                info = ({"agent": 0, **info}, {"agent": 1})
        return obs, reward, terminated, action == Do.TRUNCATE, info

    def shut(self) -> None:
        """Close."""
        self.note("close", self.build)
        self.suffer(self._close_fault, "close")

    def suffer(self, fault: str | None, where: str) -> None:
        """Do what a fault says."""
        match fault:
            case None:
                return
            case "raise":
                raise ScriptedError(f"scripted error in {where} of env {self.env_id}")
            case "strange_error":
                raise StrangeError
            case "keyboard_interrupt":
                raise KeyboardInterrupt
            case "sys_exit":
                sys.exit(3)
            case "os_exit":
                os._exit(7)
            case "os_exit_0":
                os._exit(0)
            case "SIGSEGV" | "SIGABRT" | "SIGBUS":
                os.kill(os.getpid(), signal.Signals[fault])
            case "two_argument_error":
                raise TwoArgumentError(5, f"scripted error in {where} of env {self.env_id}")
            case "local_error":

                class LocalError(Exception):
                    pass

                raise LocalError(f"scripted error in {where} of env {self.env_id}")
            case "hang_in_c":
                signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
                self.visit(where, hold_gil=True)
            case "late":
                time.sleep(self._late_s * float(np.random.default_rng().uniform(0.9, 1.1)))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "gate":
                self.visit(where)
            case "hang":
                self.visit(where, stay=True)
            case "hang_deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self.visit(where, stay=True)
            case "sleep":
                _stay(self.folder)
            case "jitter":
                time.sleep(float(np.random.default_rng().exponential(0.002)))
            case "garbage":
                # Only here: it imports the whole of envmgr, which no other worker has to.
                from envmgr.testing.faulty import write_garbage

                write_garbage()
            case _:
                raise AssertionError(f"unknown fault {fault}")

    def visit(self, where: str, *, stay: bool = False, hold_gil: bool = False) -> None:
        """Tell the test's gate that this env is here, and wait until it lets go."""
        path = gate_path(self.folder)
        if not os.path.exists(path):  # a test without gate: stay where there is no way on
            _stay(self.folder, hold_gil=hold_gil)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            hello = {"env_id": self.env_id, "where": where, "build": self.build, "pid": os.getpid()}
            sock.sendall(json.dumps(hello).encode() + b"\n")
            if hold_gil:
                _stay(self.folder, hold_gil=True)
            while not stay and sock.recv(1) not in (b"", b"g"):
                pass
            if stay:
                _stay(self.folder)


_ends: dict[str, threading.Event] = {}


def end_of(folder: str) -> threading.Event:
    """Return what is set at the end of the test whose folder this is."""
    return _ends.setdefault(folder, threading.Event())


def _stay(folder: str, *, hold_gil: bool = False) -> None:
    """Do not return; on a thread of the test's own process: not before its end."""
    if hold_gil:
        ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it does not let go of the GIL
    if threading.current_thread() is threading.main_thread():
        time.sleep(1000)
    else:
        end_of(folder).wait(1000)


@contextmanager
def _opened(path: str, mode: str) -> Iterator[io.FileIO]:
    """Open a file, and close it even if the env's time is up in the midst of that.

    `open` may have returned by then and nobody have the file yet. Here a list has it in the same
    call of C.
    """
    files: list[io.FileIO] = []
    try:
        files.extend(map(io.FileIO, [path], [mode]))
        yield files[0]
    finally:
        for file in files:
            file.close()


def journal_path(folder: str, env_id: int) -> str:
    return os.path.join(folder, f"journal-{env_id}")


def gate_path(folder: str) -> str:
    return os.path.join(folder, "gate")


def read_journal(folder: str, env_id: int) -> list[list[Any]]:
    """Return the entries of an env's journal, oldest first."""
    try:
        with _opened(journal_path(folder, env_id), "rb") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


class ScriptedEnv(BaseEnv):
    """A scripted env in the style of DI-engine."""

    observation_space = OBS_SPACE
    action_space = Discrete(64)
    reward_space = Box(-np.inf, np.inf, (1,), np.float64)
    metadata: dict[str, Any] = {"name": "scripted"}  # noqa: RUF012 - as envs have it

    def __init__(self, env_id: int, folder: str, **script: Any) -> None:
        self.script = Script(env_id, folder, **script)
        self._due: int | None = None
        self._dynamic: bool | None = None
        self._seed: int | None = None

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        self.script.note("seed", seed, dynamic_seed)
        self._seed, self._due, self._dynamic = seed, seed, dynamic_seed

    def reset(self, **params: Any) -> Any:
        obs = self.script.begin(params, self._due)
        self._due = self._seed if self._dynamic is False else None
        self.reset_info = self.script.begun()
        return obs

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.script.act(action)
        if action == Do.NOT_A_TIMESTEP:
            return "nonsense"
        return EnvTimestep(obs, reward, terminated or truncated, info)

    def close(self) -> None:
        self.script.shut()

    # -- attributes and methods for calls from outside ----------------------------------------

    @property
    def label(self) -> str:
        return self.script.label

    @property
    def unique(self) -> str:
        """Another one for each object."""
        return self.script.unique

    @property
    def knob(self) -> Any:
        return self.script.knob

    @knob.setter
    def knob(self, value: Any) -> None:
        self.script.note("knob", value)
        self.script.knob = value

    @property
    def gated(self) -> str:
        self.script.visit("attribute")
        return self.script.label

    def scaled(self, factor: float, offset: float = 0.0) -> float:
        self.script.note("call", "scaled", factor, offset)
        return self.script.env_id * factor + offset

    def fail(self, fault: str) -> None:
        self.script.note("call", "fail", fault)
        self.script.suffer(fault, "call")

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def remember(self, thing: Any) -> list[Any]:
        self.script.calls.append(thing)
        return self.script.calls

    def user_defined(self) -> str:
        return f"user-defined of {self.script.env_id}"

    def start_child(self) -> int:
        """Start a process that does nothing for long, and return its pid."""
        return subprocess.Popen(["sleep", "1000"]).pid

    def start_daemon(self) -> list[int]:
        """Start a process that is nobody's child and in a session of its own; it has one like it.

        Returns:
            Both pids.
        """
        second = "setsid sleep 1000 >&- 2>&- & echo $$ $!"
        first = f"setsid sh -c '{second}; exec sleep 1000 >&- 2>&-' & exit"
        told = subprocess.run(["sh", "-c", first], stdout=subprocess.PIPE, check=True).stdout
        return [int(pid) for pid in told.split()]

    def await_a_child(self) -> int:
        """Start a process, and return its exit status as it is known somewhat later."""
        with subprocess.Popen(["sh", "-c", "exit 5"]) as child:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            self.start_daemon()
            return child.wait()

    def fork_a_child_that_aborts(self) -> None:
        """Fork this process, and wait for the child's end."""
        child = os.fork()
        if child == 0:
            print("from the child", file=sys.stderr)
            os.abort()
        os.waitpid(child, 0)


class ScriptedGymEnv(gymnasium.Env[Any, Any]):
    """The same in the style of gymnasium."""

    observation_space = OBS_SPACE
    action_space = Discrete(64)
    metadata: dict[str, Any] = {"name": "scripted", "render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, env_id: int, folder: str, **script: Any) -> None:
        self.script = Script(env_id, folder, **script)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        obs = self.script.begin(options or {}, seed)
        return obs, self.script.begun()

    def step(self, action: Any) -> Any:
        if action == Do.NOT_A_TIMESTEP:
            self.script.act(action)
            return "nonsense"
        return self.script.act(action)

    def render(self) -> Any:
        return np.full((2, 2, 3), self.script.env_id, np.uint8)

    def close(self) -> None:
        self.script.shut()

    @property
    def label(self) -> str:
        return self.script.label

    @property
    def unique(self) -> str:
        return self.script.unique


class SampleEnv(gymnasium.Env[Any, Any]):
    """Returns samples of any observation space, drawn from its own seeded generator.

    Args:
        space: the observation space.
        episode_length: steps of an episode.
        jitter_s: mean of the random time that steps and resets take; 0 for none.
    """

    def __init__(self, space: Any, *, episode_length: int = 4, jitter_s: float = 0.0) -> None:
        self.observation_space = copy.deepcopy(space)
        self.action_space = Discrete(3)
        self._episode_length = episode_length
        self._jitter_s = jitter_s
        self._clock_noise = np.random.default_rng()
        self._left = 0
        self._sum = 0

    def _sample(self) -> Any:
        if self._jitter_s:
            time.sleep(float(self._clock_noise.exponential(self._jitter_s)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = self._episode_length
        return self._sample(), {"noise": float(self.np_random.random())}

    def step(self, action: Any) -> Any:
        self._left -= 1
        self._sum += int(action)
        obs = self._sample()
        return obs, float(self.np_random.random()), self._left == 0, False, {"sum": self._sum}


class SeedOnly(SampleEnv):
    """Its `reset` takes no options, as that of many envs which people write."""

    def __init__(self) -> None:
        super().__init__(Box(0, 1, (2,), np.float32))

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class NothingTaken(SeedOnly):
    """Its `reset` takes nothing at all."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()
