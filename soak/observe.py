"""Watches one probe from outside, with time limits, and says what was seen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from faults import VICTIM  # noqa: E402
from stalls import Stalls  # noqa: E402

from tests.leak_guard import LeakGuard, Process, Snapshot  # noqa: E402

PROBE = HERE / "probe.py"
START_LIMIT_S = 90.0
CALL_LIMIT_S = 10.0
"""A call that takes longer hangs; so does a process that should have ended."""
INTERRUPT_LIMIT_S = 5.0
SETTLE_S = 1.0
"""After so long, a process that is still there is left over."""
END_SETTLE_S = 10.0
"""The same after the trainer's end, which daemons of some libraries notice only after seconds."""

STALL_S = 0.5
ATTEMPTS = 4

_POLL_S = 0.05
_LOG_CHARACTERS = 4000
_NAMED = re.compile(
    rf"\b(?:env|environment|worker|actor|subprocess|subprocess_env_manager)s?"
    rf"[ _\-#:\[(]*{VICTIM}\b",
    re.IGNORECASE,
)
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


class Observer:
    """Runs probes one after the other."""

    def __init__(self) -> None:
        self._guard = LeakGuard()

    def observe(self, library: str, fault: str, python: str) -> dict[str, Any]:
        """Return what was seen of one fault in one library.

        It is looked at again, some times, when the machine stood still meanwhile.

        Args:
            library: its name.
            fault: its name.
            python: the interpreter that has the library.
        """
        for _ in range(ATTEMPTS):
            with Stalls() as stalls:
                facts = self._observe(library, fault, python)
            facts = json.loads(_without_places(json.dumps(facts), python))
            facts["longest_stall_s"] = round(stalls.longest_s, 3)
            if stalls.longest_s < STALL_S:
                break
        return facts

    def _observe(self, library: str, fault: str, python: str) -> dict[str, Any]:
        before = self._guard.snapshot()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            watch = _Watch(Path(folder), library, fault, python, self._guard, before)
            try:
                facts = watch.run()
            finally:
                watch.end()
                self._guard.wait_until_clean(before, 0.0)
        return facts


class _Watch:
    """One probe."""

    def __init__(
        self,
        folder: Path,
        library: str,
        fault: str,
        python: str,
        guard: LeakGuard,
        before: Snapshot,
    ) -> None:
        self._fault = fault
        self._guard = guard
        self._before = before
        self._log = folder / "log"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "socket"))
        self._socket.settimeout(_POLL_S)
        with self._log.open("wb") as log:
            self._probe = subprocess.Popen(
                [python, str(PROBE), library, fault, str(folder / "socket")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._calls: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {"hangs": None, "interruptible": None, "ended_early": None}

    def run(self) -> dict[str, Any]:
        """Watch it to its end."""
        closed = self._watch_calls()
        facts = self._facts
        if closed:
            facts["left_after_close"] = self._left(self._probe.pid, SETTLE_S)
        self._end_probe()
        facts["left_after_end"] = self._left(None, END_SETTLE_S)
        facts["calls"] = self._calls
        log = self._log.read_text(errors="replace")
        facts["named_in_log"] = bool(_NAMED.search(log))
        facts["tracebacks_in_log"] = log.count("Traceback (most recent call last)")
        facts["log_end"] = [line.strip() for line in log[-_LOG_CHARACTERS:].splitlines()[-12:]]
        return facts

    def end(self) -> None:
        """Kill what is left of the probe itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._probe.pid, signal.SIGKILL)
        self._probe.wait()
        if self._probe.stdin is not None:
            with contextlib.suppress(OSError):
                self._probe.stdin.close()
        self._socket.close()

    def _watch_calls(self) -> bool:
        """Follow the calls until the probe has closed its peer; return whether it came so far."""
        limit_s, doing = START_LIMIT_S, "import"
        deadline = time.monotonic() + limit_s
        after_fault = False
        while True:
            event = self._next(deadline)
            if event is None:
                if self._probe.poll() is not None:
                    self._facts["ended_early"] = {"call": doing, "status": self._probe.returncode}
                    return False
                if not self._interrupt(doing):
                    return False
                deadline = time.monotonic() + INTERRUPT_LIMIT_S
                continue
            kind = event.pop("event")
            if kind == "doing":
                doing = event["call"]
                limit_s = START_LIMIT_S if doing == "start" else CALL_LIMIT_S
                if self._fault == "trainer-killed" and after_fault:
                    time.sleep(SETTLE_S)  # by then the env hangs
                    self._probe.kill()
                    self._probe.wait()
                    return False
            elif kind == "did":
                self._calls.append({**event, "after_fault": after_fault})
                limit_s = CALL_LIMIT_S
            elif kind == "fault":
                after_fault = True
            else:
                return kind == "closed"
            deadline = time.monotonic() + limit_s

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event; None if the probe has ended or is late."""
        while True:
            with contextlib.suppress(TimeoutError, ValueError):
                event = json.loads(self._socket.recv(1 << 20))
                if isinstance(event, dict) and "event" in event:
                    return event
            ended = self._probe.poll() is not None
            if ended or time.monotonic() > deadline:
                return None

    def _interrupt(self, doing: str) -> bool:
        """Note a hang and send Ctrl-C to the probe, once for each call; False when that fails."""
        facts = self._facts
        hung = facts["hangs"] or []
        if doing in hung:
            facts["interruptible"] = False
            return False
        facts["hangs"], facts["interruptible"] = [*hung, doing], True
        self._probe.send_signal(signal.SIGINT)
        return True

    def _end_probe(self) -> None:
        """Let the probe end by itself, as a script does that has come to its end."""
        probe, began = self._probe, time.monotonic()
        if self._facts["interruptible"] is not False:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                probe.communicate(b"go on\n", timeout=CALL_LIMIT_S)
        self._facts["ends"] = probe.poll() is not None
        self._facts["end_s"] = round(time.monotonic() - began, 2)
        if probe.poll() is None:
            probe.kill()
            probe.wait()

    def _left(self, trainer_pid: int | None, settle_s: float) -> list[str]:
        """Return the processes that are still there after `settle_s`, but for the trainer's."""
        deadline = time.monotonic() + settle_s
        while True:
            now = self._guard.snapshot().processes
            left = [
                process
                for key, process in now.items()
                if key not in self._before.processes
                and process.pid != trainer_pid
                and not _is_helper(process, trainer_pid)
            ]
            if not left or time.monotonic() > deadline:
                return ["zombie" if process.zombie else "process" for process in left]
            time.sleep(_POLL_S)


def _is_helper(process: Process, trainer_pid: int | None) -> bool:
    """Whether this is a helper of multiprocessing or Ray, which live as long as the trainer.

    Ray's are its daemons, and workers that have nothing to do; an actor has its class as its name.
    """
    if trainer_pid is None:
        return False
    if process.parent_pid == trainer_pid and any(
        name in process.command
        for name in ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    ):
        return True
    return "/site-packages/ray/" in process.command or process.command.startswith(_RAYS_OWN)


def _without_places(text: str, python: str) -> str:
    """Return a text without folders of this machine, and without its addresses in networks."""
    for path in (str(ROOT), sys.prefix, str(Path(python).parent.parent), str(Path.home())):
        text = text.replace(path, "...")
    return _ADDRESS.sub("...", text)


def names_victim(text: str) -> bool:
    """Whether a text names the env that had the fault."""
    return bool(_NAMED.search(text))
