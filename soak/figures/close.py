"""Close: how long it takes when envs hang and do not respond."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envmgr import create_env_manager
from envmgr.errors import ManagerClosedError
from envmgr.testing import LedgerEnv
from envmgr.testing.faulty import hang_holding_gil
from figures import Figure

GRACE_S = 1.0
SLACK_S = 1.0
HUNG, QUICK_HUNG = (1, 64, 256), (1, 16)
PATIENCE_S = 60.0


class HangingEnv(LedgerEnv):
    """An env that hangs in its steps, after it has said so by creating a file in `folder`."""

    def __init__(self, env_id: int, folder: str) -> None:
        super().__init__(env_id)
        self._path = os.path.join(folder, str(env_id))

    def step(self, action: int) -> Any:
        """Hang in C, holding the GIL, with all signals blocked."""
        Path(self._path).touch()
        hang_holding_gil()


def measure(quick: bool) -> Sequence[Figure]:
    """Measure with several numbers of hung workers, and with several ways to close."""
    figures = [figure(f"{n} hung workers", n, close_twice) for n in (QUICK_HUNG if quick else HUNG)]
    return [
        *figures,
        figure("8 hung workers in one process each, two threads at once", 8, _close_in_threads),
        figure("8 hung workers, from a thread while the trainer waits for them", 8, _close_waiting),
        figure("8 hung workers, while another one is renewed", 8, _close_renewing),
        figure("8 envs in one hung worker", 8, close_twice, num_workers=1),
    ]


def figure(title: str, n: int, close: Callable[[Any], None], **cfg: Any) -> Figure:
    """Measure one way to close."""
    with tempfile.TemporaryDirectory() as folder:
        env_fn = [partial(HangingEnv, env_id, folder) for env_id in range(n)]
        env_fn.append(partial(LedgerEnv, n))  # this one does not hang
        manager = create_env_manager(
            {"type": "async_subprocess", "close_timeout": GRACE_S, **cfg}, env_fn=env_fn
        )
        manager.launch()
        pids = [worker["pid"] for worker in manager.stats()["workers"]]
        manager.send(dict.fromkeys(range(n), 1))
        _await_hangs(folder, 1 if cfg else n)
        began = time.monotonic()
        close(manager)
        seconds = time.monotonic() - began
        left = sum(map(_is_alive, pids))
    return Figure(
        f"close with {title}, grace {GRACE_S:g} s",
        f"{seconds:.2f} s, {left} workers left",
        f"{GRACE_S + SLACK_S:g} s, none left",
        seconds <= GRACE_S + SLACK_S and left == 0,
    )


def _await_hangs(folder: str, n: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(os.listdir(folder)) < n:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(os.listdir(folder))} envs of {n} hang after {PATIENCE_S} s")
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def close_twice(manager: Any) -> None:
    """Close the manager, and close it again once it is closed."""
    manager.close()
    manager.close()  # without effect


def _close_in_threads(manager: Any) -> None:
    threads = [threading.Thread(target=manager.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _close_waiting(manager: Any) -> None:
    """Close the manager while another thread waits for the hung envs."""
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            manager.recv()
        except ManagerClosedError as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    manager.close()
    waiting.join(PATIENCE_S)
    if not outcome:
        raise RuntimeError("recv() went on after close()")


def _close_renewing(manager: Any) -> None:
    """Kill the worker that does not hang, and close as soon as its renewal has begun."""
    victim = next(
        w["pid"]
        for w in manager.stats()["workers"]
        if len(w["env_ids"]) == 1 and w["env_ids"][0] == manager.env_num - 1
    )
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while not manager.stats()["failures"] and time.monotonic() < deadline:
        manager.recv(timeout_s=0.0)
    manager.close()
