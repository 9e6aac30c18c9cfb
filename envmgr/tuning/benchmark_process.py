"""Measures one library or setting in a process of its own, so that it cannot affect the others.

The process reads from one line what to run; then, for each line with a number of seconds, it steps
for that long and answers with a line of JSON. It ends when its input ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

import cloudpickle

from envmgr import pickles
from envmgr.errors import EnvManagerError
from envmgr.interpreters import clean_children, command_of_main, path_line
from envmgr.texts import exit_text
from envmgr.tuning.loops import Loop
from envmgr.tuning.measuring import Course, ErrorText, PolicyOf, Runner, stepped_for
from envmgr.tuning.peers import Peer, loop_of
from envmgr.tuning.settings import setting_of
from envmgr.types import EnvFactory

_END_S = 10.0


_MOST_OF_A_TEXT = 2000
"""Characters of an error that is not envmgr's own, such as one with the traceback of a worker."""


class ContestantError(EnvManagerError):
    """A contestant cannot be run; the message says why, as a command shows it."""


class Contestant:
    """A library running envs in a process of its own.

    Args:
        peer: the library; None stands for envmgr with `config`.
        factories: factories of the envs; a peer runs as many envs, all of the first factory.
        limit_s: how long the start may take, and how far a measurement may exceed its time.
        policy_of: returns the policy, for envmgr only; see `Course`.
        error_text: returns the message of an error of envmgr's as it is shown.

    Raises:
        ContestantError: it did not start.
    """

    def __init__(
        self,
        peer: Peer | None,
        factories: Sequence[EnvFactory],
        config: Mapping[str, Any],
        limit_s: float,
        policy_of: PolicyOf | None = None,
        error_text: ErrorText = str,
    ) -> None:
        self._limit_s = limit_s
        packed = pickles.dumps((error_text, (peer, list(factories), dict(config), policy_of)))
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            command_of_main(__name__, "-W", "ignore"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._ask(path_line() + base64.b64encode(packed), limit_s)

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        """Step for some seconds, after a lead that does not count; return steps per second.

        Raises:
            ContestantError: it failed, or has not answered in time; its process has ended.
        """
        line = json.dumps((seconds, lead_s)).encode()
        return float(self._ask(line, seconds + lead_s + self._limit_s))

    def close(self, grace_s: float = _END_S) -> None:
        """End the process: give it `grace_s` to close its envs, then kill it and its children."""
        process = self._process
        if process.stdout is None or process.stdout.closed:  # it was ended before
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _ask(self, line: bytes, limit_s: float) -> Any:
        try:
            return self._answer_to(line, limit_s)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _answer_to(self, line: bytes, limit_s: float) -> Any:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise ContestantError("it has no pipes")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        if not wait([process.stdout.fileno()], limit_s):  # `select` knows no fds above 1023
            raise ContestantError(f"nothing came within {limit_s:.0f} s")
        answer = process.stdout.readline()
        if not answer:
            raise ContestantError(f"its process ended: {exit_text(process.wait())}")
        found = json.loads(answer)
        if "error" in found:
            raise ContestantError(found["error"])
        return found["value"]


def main() -> None:
    """Run as the process of a contestant."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and envs print is no answer
    lines = sys.stdin.buffer

    def say(**found: Any) -> None:
        print(json.dumps(found), file=answer, flush=True)

    error_text: ErrorText = str
    try:
        error_text, what = cloudpickle.loads(base64.b64decode(lines.readline()))
        with clean_children():  # also of libraries that start theirs through multiprocessing
            runner = _opened(*what)
            say(value=None)
            for line in lines:
                say(value=runner.run(*json.loads(line)))
            runner.close()
    except EnvManagerError as error:
        say(error=error_text(error))
    except Exception as error:  # whatever a library or an env raises
        text = " ".join(str(error).split())
        if len(text) > _MOST_OF_A_TEXT:  # of a traceback, the cause is at the end
            text = f"... {text[-_MOST_OF_A_TEXT:].partition(' ')[2]}"
        say(error=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _opened(
    peer: Peer | None,
    factories: Sequence[EnvFactory],
    config: Mapping[str, Any],
    policy_of: PolicyOf | None,
) -> Runner:
    if peer is None:
        return Course(setting_of(config), config, factories, policy_of)
    return _PeerCourse(loop_of(peer, factories[0], len(factories)))


class _PeerCourse:
    """A peer at work; see `Runner`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        loop.start()
        self.close = loop.close

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        """Step for some seconds, after a lead that does not count; return steps per second."""
        stepped_for(self._loop.step, lead_s)
        return stepped_for(self._loop.step, seconds)
