"""Starvation: an env of a shared host fails while its neighbours are stepped without a pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr import create_env_manager
from figures import Figure, in_ms, quantile
from figures.loop import ENDLESS

ENV_NUM = 8
FAILING = 3
READY_S = 0.020
FAILURES, QUICK_FAILURES = 200, 10
PATIENCE_S = 5.0


class NullEnv(gymnasium.Env[Any, Any]):
    """An env that does nothing, and raises at action 1."""

    observation_space, action_space = Box(-1.0, 1.0, (4,), np.float32), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        """Take a step."""
        if action == 1:
            raise ValueError("action 1")
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Way(NamedTuple):
    """How steps are sent and gathered.

    Attributes:
        cfg: the config of the manager.
        send: sends action 0 to envs.
        gather: returns the env_ids whose timesteps have arrived.
    """

    cfg: dict[str, Any]
    send: Callable[[Any, Sequence[int]], None]
    gather: Callable[[Any], Sequence[int]]


def _send(manager: Any, env_ids: Sequence[int]) -> None:
    manager.send(dict.fromkeys(env_ids, 0))


def _send_arrays(manager: Any, env_ids: Sequence[int]) -> None:
    manager.send_arrays(np.array(env_ids), np.zeros(len(env_ids), np.int64))


_ASYNC = {"type": "async_subprocess", "wait_num": 4}
WAYS = {
    "all": Way({"type": "subprocess"}, _send, lambda manager: list(manager.recv())),
    "all, arrays": Way(
        {"type": "subprocess"}, _send_arrays, lambda manager: manager.recv_arrays().env_ids.tolist()
    ),
    "wait_num 4": Way(_ASYNC, _send, lambda manager: list(manager.recv())),
    "min_ready 1": Way(_ASYNC, _send, lambda manager: list(manager.recv(min_ready=1))),
}


def measure(quick: bool) -> Sequence[Figure]:
    """Measure each way to gather, with one host and with two."""
    n = QUICK_FAILURES if quick else FAILURES
    return [_figure(name, hosts, n) for hosts in (1, 2) for name in WAYS]


def _figure(name: str, hosts: int, n: int) -> Figure:
    seconds, most_steps = run(WAYS[name], hosts, n)
    ready_s = quantile(seconds, 0.99)
    return Figure(
        f"{ENV_NUM} null envs, num_workers {hosts}, {name}: ready after {n} failures, p99",
        f"{in_ms(ready_s)}, median {in_ms(quantile(seconds, 0.5))}, longest "
        f"{in_ms(max(seconds))}, {most_steps} steps of the others meanwhile at most",
        in_ms(READY_S),
        ready_s <= READY_S,
    )


def run(way: Way, hosts: int, n: int) -> tuple[list[float], int]:
    """Have an env fail `n` times.

    Returns:
        The seconds from when each failure is known until the env is ready, and the most steps that
        the others have taken meanwhile.
    """
    cfg = {**ENDLESS, "num_workers": hosts, **way.cfg}
    with create_env_manager(cfg, env_fn=[NullEnv] * ENV_NUM) as manager:
        runs = [_fail_once(manager, way) for _ in range(n)]
    return [seconds for seconds, _ in runs], max(n_steps for _, n_steps in runs)


def _fail_once(manager: Any, way: Way) -> tuple[float, int]:
    outstanding = set(range(ENV_NUM))
    manager.send({env_id: int(env_id == FAILING) for env_id in outstanding})

    def go_on() -> int:
        came = [env_id for env_id in way.gather(manager) if env_id != FAILING]
        outstanding.difference_update(came)
        return len(came)

    while FAILING in outstanding:
        came = way.gather(manager)
        outstanding.difference_update(came)
    began = time.monotonic()
    n_steps = 0
    while FAILING not in manager.ready_env and time.monotonic() < began + PATIENCE_S:
        idle = [i for i in range(ENV_NUM) if i != FAILING and i not in outstanding]
        outstanding.update(idle)
        if idle:
            way.send(manager, idle)
        n_steps += go_on()
    seconds = time.monotonic() - began
    while outstanding:
        go_on()
    return seconds, n_steps
