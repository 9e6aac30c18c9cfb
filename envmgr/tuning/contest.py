"""A process in which one contestant runs envs: what it does to the process is its own affair.

It reads, as one line, what to run; then, for each line with a number of seconds, it steps for so
long and answers with a line of JSON. The end of its input ends it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from envmgr import pickles
from envmgr.tuning.loops import Loop
from envmgr.tuning.measuring import Course
from envmgr.tuning.peers import Peer, loop_of
from envmgr.tuning.settings import setting_of
from envmgr.types import EnvFactory

_END_S = 10.0


class ContestantError(RuntimeError):
    """A contestant cannot be run; the message says why."""


class Contestant:
    """A library running envs in a process of its own.

    Args:
        peer: which; None is envmgr with `config`.
        factory: of the envs.
        env_num: how many.
        config: of envmgr's manager.
        limit_s: how long the start, or what goes beyond the time of a measurement, may take.

    Raises:
        ContestantError: it did not start.
    """

    def __init__(
        self,
        peer: Peer | None,
        factory: EnvFactory,
        env_num: int,
        config: Mapping[str, Any],
        limit_s: float,
    ) -> None:
        self._limit_s = limit_s
        packed = pickles.dumps((peer, factory, env_num, dict(config), sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "envmgr.tuning.contest"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        try:
            self._ask(base64.b64encode(packed), limit_s)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def run(self, seconds: float) -> float:
        """Step for a while and return steps per second.

        Raises:
            ContestantError: it failed, or has not answered in time.
        """
        return float(self._ask(repr(seconds).encode(), seconds + self._limit_s))

    def close(self, grace_s: float = _END_S) -> None:
        """End the process, which has so long to close its envs; then it is killed with its own."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _ask(self, line: bytes, limit_s: float) -> Any:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise ContestantError("it has no pipes")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], limit_s)[0]:
            raise ContestantError(f"nothing came within {limit_s:.0f} s")
        answer = process.stdout.readline()
        if not answer:
            raise ContestantError(f"its process ended with {process.wait()}")
        found = json.loads(answer)
        if "error" in found:
            raise ContestantError(found["error"])
        return found["value"]


def main() -> None:
    """Be the contestant."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and envs print is no answer
    lines = sys.stdin.buffer

    def say(**found: Any) -> None:
        print(json.dumps(found), file=answer, flush=True)

    try:
        peer, factory, env_num, config, path = cloudpickle.loads(base64.b64decode(lines.readline()))
        sys.path[:] = path
        run, close = _opened(peer, factory, env_num, config)
        say(value=None)
        for line in lines:
            say(value=run(float(line)))
        close()
    except Exception as error:  # whatever a library or an env raises
        text = " ".join(str(error).split())
        say(error=f"{type(error).__name__}: {text}"[:300])


def _opened(
    peer: Peer | None, factory: EnvFactory, env_num: int, config: Mapping[str, Any]
) -> tuple[Callable[[float], float], Callable[[], None]]:
    if peer is None:
        course = Course(setting_of(config), config, [factory] * env_num, changes={})
        return course.run, course.close
    loop = loop_of(peer, factory, env_num)
    loop.start()
    return lambda seconds: _rate_of(loop, seconds), loop.close


def _rate_of(loop: Loop, seconds: float) -> float:
    steps, began = 0, time.perf_counter()
    end = began + seconds
    while True:
        steps += loop.step()
        now = time.perf_counter()
        if now >= end:
            return steps / max(now - began, 1e-9)


if __name__ == "__main__":
    main()
