"""A worker process in which an env is tried out, to see what the env does to that process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np

from envmgr import pickles
from envmgr.errors import EnvCrash, EnvFailure, EnvManagerError, EnvRaised, EnvTimeout
from envmgr.manager import EnvManager
from envmgr.manager.tally import Tally
from envmgr.shortcuts import create_env_manager

_MANY = 1_000_000
_MOST_LINES = 30
_PACKAGE = str(Path(__file__).parents[2])
_OF_FAULTHANDLER = ("Extension modules:", "Traceback (most")


class ProbeResult(NamedTuple):
    """The result of a probe.

    Attributes:
        value: what the probe returned; None if it failed.
        failure: what happened instead: the probe raised, crashed or hung.
    """

    value: Any = None
    failure: EnvManagerError | None = None

    @property
    def text(self) -> str:
        """What happened, in one line."""
        failure = self.failure
        if isinstance(failure, EnvRaised):
            return f"it raised {failure.type_name}: {' '.join(failure.remote_message.split())}"
        if isinstance(failure, EnvTimeout):
            return f"it hung: nothing came within {failure.limit_s:g} s"
        if isinstance(failure, EnvCrash):
            first = str(failure).partition("\n")[0]
            return f"its process died: {first.rpartition(': ')[2]}"
        return str(failure).partition("\n")[0]

    @property
    def stack(self) -> str:
        """Where in the env's code it happened, as lines; empty if that is not known."""
        failure, text = self.failure, ""
        if isinstance(failure, EnvRaised):
            text = failure.remote_traceback
        elif isinstance(failure, EnvTimeout):
            text = failure.stacks
        elif isinstance(failure, EnvCrash):
            text = failure.stderr_tail
        return own_frames(text)


def own_frames(text: str) -> str:
    """Return the lines of a stack or traceback without the frames that are envmgr's.

    Frames of `contextlib` next to these are left out, too: they are between two of envmgr's.
    """
    kept, skips = [], False
    for line in text.splitlines():
        is_frame = line.lstrip().startswith('File "')
        if is_frame:
            path = line.partition('"')[2]
            skips = path.startswith((_PACKAGE, "<")) or (
                skips and path.startswith(contextlib.__file__)
            )
        elif not line.startswith("    "):
            skips = False
        if not skips and not line.startswith(_OF_FAULTHANDLER):
            kept.append(line)
    return "\n".join(kept[-_MOST_LINES:])


class Laboratory:
    """Worker processes for probes: a manager applies the probes to envs that do nothing.

    After a probe that ends its process, or exceeds its limit, the next one has a new process.

    Args:
        context: how processes start, as `manager.context`.
        places: how many processes there are.
        limit_s: how long a probe may take.
        worker_log: as `manager.worker_log`.

    Raises:
        EnvManagerError: no worker could be started this way.
    """

    def __init__(
        self,
        context: str = "server",
        places: int = 1,
        limit_s: float = 60.0,
        worker_log: str | None = None,
    ) -> None:
        config = {
            "type": "subprocess",
            "context": context,
            "reset_timeout": limit_s,
            "max_failures": _MANY,
            "max_failures_total": _MANY,
            "retry_waiting_time": 0.0,
            "preload": False,
            "worker_log": worker_log,
        }
        self._manager: EnvManager = create_env_manager(config, env_fn=[_StillEnv] * places)
        self._manager.launch()

    def close(self) -> None:
        """End the processes."""
        self._manager.close()

    def run(
        self, probe: Callable[..., Any], *args: Any, place: int = 0, tally: Tally | None = None
    ) -> ProbeResult:
        """Call a function in a worker and return the result.

        Args:
            probe: the function, of a module that workers can import.
            *args: its arguments, which may hold anything that cloudpickle takes.
            place: in which of the processes to call it.
            tally: ends the process if a step or reset that is noted there hangs; None: nothing does
                so before the probe's own limit.
        """
        packed = pickles.dumps((probe, args))  # unpacked where a failure is the probe's own

        def call() -> Any:
            return self._manager.apply(_run_probe, packed, env_ids=place)[0]

        try:
            return ProbeResult(call() if tally is None else tally.watched(call))
        except EnvFailure as failure:
            return ProbeResult(failure=failure)


def _run_probe(env: Any, packed: bytes) -> Any:
    probe, args = cloudpickle.loads(packed)
    return probe(*args)


class _StillEnv(gymnasium.Env[Any, Any]):
    """An env that does nothing: probes need a process, but no env of its own in it."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        return np.zeros(1, np.float32), 0.0, False, False, {}
