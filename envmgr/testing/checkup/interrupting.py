"""A check of Ctrl-C: a separate trainer, with workers, gets one in the middle of a step."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from envmgr import pickles
from envmgr.interpreters import command_of_main, path_line
from envmgr.testing.checkup.processes import kill_marked, marked

_MARK = "ENVMGR_CHECK_MARK"
_READY = "stepping"
_SETTLE_S = 2.0
_START_S = 30.0
"""The least time that a trainer has to start; imports take long on a busy machine."""


class Interrupted(NamedTuple):
    """How a trainer ended after Ctrl-C.

    Attributes:
        problem: why it took no step, or did not end; empty if it did both.
        took_s: seconds from the signal to its end.
        left: how many of its processes were left.
    """

    problem: str = ""
    took_s: float = 0.0
    left: int = 0


def interrupt(factory: Callable[[], Any], limit_s: float) -> Interrupted:
    """Run two envs in a separate trainer, send it SIGINT while it steps, and see how it ends.

    Args:
        factory: builds the env.
        limit_s: the time limit for the start, and for the end.
    """
    mark = secrets.token_hex(16)
    packed = base64.b64encode(pickles.dumps((factory, limit_s)))
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
        command_of_main(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, _MARK: mark},
        start_new_session=True,  # as if in a terminal of its own
    )
    try:
        return _watch(process, packed, f"{_MARK}={mark}", limit_s)
    finally:
        kill_marked(f"{_MARK}={mark}")
        process.kill()
        process.communicate()


def _watch(
    process: subprocess.Popen[bytes], packed: bytes, token: str, limit_s: float
) -> Interrupted:
    said = _first_line(process, packed, limit_s)
    if said != _READY:
        return Interrupted(problem=said or "the trainer ended before it could step")
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return Interrupted(problem=f"the trainer had not ended {limit_s:g} s after Ctrl-C")
    took_s = time.monotonic() - began
    while (left := marked(token)) and time.monotonic() < began + took_s + _SETTLE_S:
        time.sleep(0.02)
    return Interrupted(took_s=took_s, left=len(left))


def _first_line(process: subprocess.Popen[bytes], packed: bytes, limit_s: float) -> str:
    import select

    if process.stdin is None or process.stdout is None:
        return "it has no pipes"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(path_line() + packed + b"\n")
        process.stdin.flush()
    if not select.select([process.stdout], [], [], max(limit_s, _START_S))[0]:
        return f"the trainer took no step within {max(limit_s, _START_S):g} s"
    line = process.stdout.readline().decode(errors="replace").strip()
    return line if line == _READY or not line else str(json.loads(line))


def main() -> None:
    """Be the trainer: read the factory from stdin, step two envs until interrupted.

    Ctrl-C has its effect even if the process that starts this one ignores it: background jobs of a
    shell, for example, are started so that they ignore it, and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the env prints is not an answer
    factory, limit_s = cloudpickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    from envmgr.errors import EnvManagerError
    from envmgr.manager.loop import ManagerLoop
    from envmgr.shortcuts import create_env_manager

    config = {"type": "subprocess", "step_timeout": limit_s, "reset_timeout": limit_s}
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with create_env_manager(config, env_fn=[factory] * 2) as manager:
                loop = ManagerLoop(manager)
                loop.step(loop.random_actions(loop.ready()))
                print(_READY, file=answer, flush=True)
                while True:
                    loop.step(loop.random_actions(loop.ready()))
        except EnvManagerError as error:
            print(json.dumps(" ".join(str(error).split())[:500]), file=answer, flush=True)
