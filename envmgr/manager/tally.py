"""A count of the random steps of an env that is tried out, and the end of one that hangs.

The worker that takes the steps may die of any of them, so the count is in a file that it shares
with the process that has it take them. The file also says when the step or reset that is under way
has to be over: where one is not, `Tally.watched` ends the worker.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from envmgr.env.play import RandomPlay
from envmgr.errors import EnvCrash, EnvTimeout
from envmgr.interruptible import InterruptibleEvent, join_thread, start_thread
from envmgr.transport.process.stacks import Stacks
from envmgr.transport.process.threads import thread_name
from envmgr.types import EnvTimestep

ATTEMPTS = 8
"""How often something is tried with an env that may end its process, or hang."""

LESS = 8
"""By this factor, less is done at the next attempt, so that it ends before an env that fails at
random does so: the last attempt of a measurement takes a step or two."""

LEAST_LIMIT_S = 2.0
"""The time limit of steps and resets of an env that has hung, if they are much faster."""

_PATIENCE = 50
"""Steps and resets of an env that has hung may take this many times as long as the longest one."""

_LOOKS_S = 0.05
"""How often the process is looked at."""

_STEP, _RESET = 0, 1
_NAMES = ("step", "reset")
_N, _PID, _DEADLINE, _KIND, _LIMITS, _LONGEST = 0, 1, 2, 3, 4, 6
_FIELDS = 8

T = TypeVar("T")


class EnvHang(EnvTimeout):
    """A step or a reset of an env that was tried out was not over in time; its worker was ended."""


class Tally:
    """What two processes on this machine know of steps that one of them takes.

    Args:
        path: the path of its file; None makes a new file, which `close` removes.
        step_s: the time limit of a step, in seconds; for a new file.
        reset_s: likewise of a reset.
    """

    def __init__(
        self, path: str | None = None, *, step_s: float = math.inf, reset_s: float = math.inf
    ) -> None:
        is_new = path is None
        if path is None:
            handle, path = tempfile.mkstemp(prefix="envmgr-tally-")
            os.close(handle)
        self.path, self._is_own = path, is_new
        try:
            with open(path, "r+b") as file:
                if is_new:
                    file.truncate(8 * _FIELDS)
                self._area = mmap.mmap(file.fileno(), 8 * _FIELDS)
        except BaseException:
            if is_new:
                os.unlink(path)
            raise
        self._values = memoryview(self._area).cast("d")
        self._began = 0.0
        if is_new:
            self._values[_LIMITS + _STEP], self._values[_LIMITS + _RESET] = step_s, reset_s

    @property
    def n(self) -> int:
        """How many steps have begun so far."""
        return int(self._values[_N])

    def close(self) -> None:
        """Release the file."""
        self._values.release()
        self._area.close()
        if self._is_own:
            os.unlink(self.path)

    # -- where the steps are taken ----------------------------------------------------------------

    def step_begins(self) -> None:
        """Count a step, and note by when it has to be over."""
        self._values[_N] += 1.0
        self._begins(_STEP)

    def reset_begins(self) -> None:
        """Note by when a reset has to be over."""
        self._begins(_RESET)

    def step_ends(self) -> None:
        """Note that a step is over, whatever came of it."""
        self._ends(_STEP)

    def reset_ends(self) -> None:
        """Likewise of a reset."""
        self._ends(_RESET)

    def _begins(self, kind: int) -> None:
        values = self._values
        values[_PID], values[_KIND] = os.getpid(), kind
        self._began = began = time.monotonic()
        values[_DEADLINE] = began + values[_LIMITS + kind]

    def _ends(self, kind: int) -> None:
        values, took_s = self._values, time.monotonic() - self._began
        values[_DEADLINE] = 0.0
        if took_s > values[_LONGEST + kind]:
            values[_LONGEST + kind] = took_s

    # -- where they are watched -------------------------------------------------------------------

    def watched(self, call: Callable[[], T]) -> T:
        """Return what a call returns that has a worker take steps; end that worker if one hangs.

        Raises:
            EnvHang: a step or a reset was not over in time. Later ones may have less time: 50 times
                as long as the longest that was over, or half of the limit if none was, and two
                seconds in any case.
            Exception: whatever the call raises.
        """
        values, is_over, stacks = self._values, InterruptibleEvent(), list[str]()
        values[_DEADLINE] = 0.0  # that of a worker that died in a step

        def watch() -> None:
            while not is_over.wait(_LOOKS_S):
                deadline, pid = values[_DEADLINE], int(values[_PID])
                if 0.0 < deadline < time.monotonic() and pid != os.getpid():
                    found = Stacks().of(pid)
                    with contextlib.suppress(ProcessLookupError):  # it has died by itself
                        os.kill(pid, signal.SIGKILL)
                        stacks.append(found)
                    return

        watcher = threading.Thread(target=watch, name=thread_name("tally"), daemon=True)
        try:
            start_thread(watcher)
            return call()
        except EnvCrash as failure:
            is_over.set()
            join_thread(watcher)  # so that it has noted what it did
            if not stacks:
                raise
            raise self._hang(failure, stacks[0]) from failure
        finally:
            is_over.set()
            join_thread(watcher)

    def _hang(self, failure: EnvCrash, stacks: str) -> EnvHang:
        """Return what is known of a worker that was ended, and be less patient from now on."""
        values, kind = self._values, int(self._values[_KIND])
        limit_s, longest_s = values[_LIMITS + kind], values[_LONGEST + kind]
        # The first ones may be far slower than the others, where code or files are loaded.
        shorter_s = _PATIENCE * longest_s if longest_s else limit_s / 2
        values[_LIMITS + kind] = min(limit_s, max(LEAST_LIMIT_S, shorter_s))
        return EnvHang(
            f"env {failure.env_id} (generation {failure.generation}) hung: a {_NAMES[kind]} of "
            f"it was not over within {limit_s:g} s"
            + (f"\n\nWhere it was:\n{stacks}" if stacks else ""),
            env_id=failure.env_id,
            during=failure.during,
            generation=failure.generation,
            limit_s=limit_s,
            stacks=stacks,
        )


class TalliedPlay(RandomPlay):
    """A play that notes in a tally when its steps and resets begin and end.

    Args:
        env: as for `RandomPlay`.
        tally: the tally.
    """

    def __init__(self, env: Any, tally: Tally) -> None:
        super().__init__(env)
        self._tally = tally

    def reset(self, params: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; see `RandomPlay`."""
        self._tally.reset_begins()
        try:
            return super().reset(params)
        finally:
            self._tally.reset_ends()

    def step(self, action: Any) -> EnvTimestep:
        """Take a step; see `RandomPlay`."""
        self._tally.step_begins()
        try:
            return super().step(action)
        finally:
            self._tally.step_ends()
