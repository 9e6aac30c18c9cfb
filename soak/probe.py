"""Puts one fault to one library, in a process of its own: `python probe.py LIBRARY FAULT SOCKET`.

It reports what happens as datagrams of JSON to SOCKET, and judges nothing. `observe.py` starts it,
watches it from outside, and interrupts (SIGINT) or kills it when a call does not come back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import peers
from faults import (
    ACTION,
    END_ACTION,
    ENV_ID,
    FAULT_ACTION,
    FAULTS,
    NO_ACTION,
    PID,
    SLOW_ACTION,
    SLOW_S,
    STEPS,
    VICTIM,
    Fault,
    factories,
)

ROUNDS_BEFORE = 2
ROUNDS_AFTER = 12
ENOUGH = 5
"""So many right timesteps after the fault show that an env goes on."""
PAUSE_S = 0.2
"""Between rounds after the fault, so that what goes on in the background gets some time."""


class Report:
    """Tells the observer what happens."""

    def __init__(self, address: str) -> None:
        self._address = address

    def say(self, event: str, **facts: Any) -> None:
        """Send an event; the socket is opened for each, so that workers inherit none."""
        text = json.dumps({"event": event, **facts})
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), self._address)

    @contextlib.contextmanager
    def call(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Say that a call begins and how it ended; what it raises is kept in `result["error"]`."""
        result: dict[str, Any] = {"error": None}
        self.say("doing", call=name, **facts)
        began = time.monotonic()
        try:
            yield result
        except BaseException as error:
            result["error"] = describe(error)
        seconds = round(time.monotonic() - began, 3)
        self.say("did", call=name, seconds=seconds, **facts, **result)


def describe(error: BaseException) -> dict[str, Any]:
    """Return what can be seen of an exception."""
    cls = type(error)
    return {
        "type": cls.__qualname__.rpartition(".")[2],
        "modules": [base.__module__.partition(".")[0] for base in cls.__mro__],
        "is_timeout": any(base.__name__ == "TimeoutError" for base in cls.__mro__),
        "env_id": getattr(error, "env_id", None),
        "text": str(error)[:2000],
    }


class Run:
    """Steps a peer, checks what it delivers, and goes on after errors as far as that works."""

    def __init__(self, peer: peers.Peer, report: Report) -> None:
        self._peer = peer
        self._report = report
        self._round = 0
        self._may_be_first: set[int] = set()
        self.pids: dict[int, int] = {}

    def start(self) -> bool:
        """Build and reset; return whether it worked."""
        with self._report.call("start") as result:
            result["envs"] = self._note(self._peer.start())
        return result["error"] is None

    def step(self, victims_action: int | None = None, others_action: int | None = None) -> Any:
        """Step all envs that are ready once; return the error that was raised, if any."""
        self._round += 1
        with self._report.call("step", round=self._round) as result:
            actions = {
                env_id: self._round * 10 + env_id if others_action is None else others_action
                for env_id in self._peer.ready()
            }
            if victims_action is not None and VICTIM in actions:
                actions[VICTIM] = victims_action
            outcomes = self._peer.step(actions)
            result.update(self._check(actions, outcomes))
        return result["error"]

    def reset(self) -> Any:
        """Reset all envs; return the error that was raised, if any."""
        with self._report.call("reset") as result:
            self._note(self._peer.reset())
        return result["error"]

    def go_on(self) -> None:
        """Step on after the fault; when that raises twice in a row, reset once and step on."""
        errors_in_row, has_reset = 0, False
        for _ in range(ROUNDS_AFTER):
            time.sleep(PAUSE_S)
            error = self.step()
            if error is None:
                errors_in_row = 0
                continue
            if error["type"] == "KeyboardInterrupt":  # it hung, and the observer ended that
                return
            errors_in_row += 1
            if errors_in_row == 2:
                if has_reset or self.reset() is not None:
                    return
                has_reset, errors_in_row = True, 0

    def _note(self, first: Mapping[int, Any]) -> list[int]:
        for env_id, obs in first.items():
            self.pids[env_id] = int(obs[PID])
            self._may_be_first.add(env_id)
        return sorted(first)

    def _check(self, actions: Mapping[int, int], outcomes: Mapping[int, peers.Outcome]) -> Any:
        right, wrong, errors = [], {}, {}
        for env_id, outcome in outcomes.items():
            if outcome.error is not None:
                errors[env_id] = describe(outcome.error)
                self._may_be_first.add(env_id)
            elif problem := self._problem(env_id, _action_of(outcome, actions, env_id), outcome):
                wrong[env_id] = problem
            else:
                right.append(env_id)
                self.pids[env_id] = int(outcome.obs[PID])
        return {"right": right, "wrong": wrong, "errors": errors}

    def _problem(self, env_id: int, action: int | None, outcome: peers.Outcome) -> str:
        """Return what is wrong with a timestep that was delivered as an ordinary one, or nothing.

        The first observation of an episode is right where an episode has ended before.
        """
        obs = outcome.obs
        shape = getattr(obs, "shape", None)
        if shape != (4,):
            return f"observation of shape {shape}"
        first = obs[STEPS] == 0 and obs[ACTION] == NO_ACTION
        if first and (outcome.done or env_id in self._may_be_first) and obs[ENV_ID] == env_id:
            self._may_be_first.discard(env_id)
            return ""
        self._may_be_first.discard(env_id)
        if outcome.done:
            self._may_be_first.add(env_id)
        found = [float(obs[ENV_ID]), float(obs[ACTION]), outcome.reward]
        expected = [float(env_id), float(-1 if action is None else action)]
        if found == [*expected, expected[1]]:
            return ""
        names = "nan" if any(map(math.isnan, found)) else str(found)
        return f"(env, action, reward) is {names}, and was to be {[*expected, expected[1]]}"


def _action_of(outcome: peers.Outcome, actions: Mapping[int, int], env_id: int) -> int | None:
    return actions.get(env_id) if outcome.action is None else outcome.action


def put(fault: Fault, run: Run, report: Report) -> None:
    """Have the fault happen, and go on after it."""
    report.say("fault")
    if fault.where == "idle":
        os.kill(run.pids[VICTIM], signal.SIGKILL)
        time.sleep(PAUSE_S)
    elif fault.where == "reset":
        run.step(victims_action=END_ACTION)
    elif fault.where == "step":
        error = run.step(victims_action=FAULT_ACTION)
        if error is not None and error["type"] == "KeyboardInterrupt":
            return
    if fault.where in ("idle", "reset", "step"):
        run.go_on()


def interrupted(run: Run, report: Report) -> None:
    """Send Ctrl-C to the whole group, as a terminal does, in the midst of a step."""
    report.say("fault")
    timer = threading.Timer(SLOW_S / 3, os.killpg, (os.getpgrp(), signal.SIGINT))
    timer.start()
    run.step(victims_action=SLOW_ACTION, others_action=SLOW_ACTION)
    timer.join()


def main() -> None:
    """Run one fault; the observer ends the process where the fault does not."""
    library, name, address = sys.argv[1:]
    fault, report = FAULTS[name], Report(address)
    # A shell may start its children with SIGINT ignored; here it is the way out of a hang.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    peer = peers.open_peer(library, factories(name), fault.users)
    run = Run(peer, report)
    if run.start():
        for _ in range(ROUNDS_BEFORE):
            run.step()
        if name == "trainer-killed":
            report.say("fault")
            run.step(victims_action=FAULT_ACTION)
        elif name == "ctrl-c":
            interrupted(run, report)
        else:
            put(fault, run, report)
    if name == "exit-open":
        report.say("ends")
        return
    if name == "dropped":
        del peer, run
        gc.collect()
    else:
        with report.call("close"):
            peer.close()
        if name == "close-twice":
            with report.call("close again"):
                peer.close()
    report.say("closed")
    sys.stdin.readline()  # the observer looks at what is left, and says when that is done
    report.say("ends")


if __name__ == "__main__":
    main()
