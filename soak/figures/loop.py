"""The trainer's loop that several entries share: managers of ledger envs that get hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from envmgr import create_env_manager
from envmgr.testing import LedgerEnv, vulnerable

ANY_NUMBER = 10**9
ENDLESS = {"max_failures": ANY_NUMBER, "failure_window_s": 0.001, "retry_waiting_time": 0.0}
"""Failures are neither limited nor slowed down: here they are the purpose."""


def ledger_manager(env_num: int, **cfg: Any) -> Any:
    """Return a launched manager of ledger envs whose workers can be hurt in every way."""
    step_s = cfg.pop("step_s", 0.0)
    env_fn = vulnerable(_factory(env_id, step_s) for env_id in range(env_num))
    manager = create_env_manager({"seed": 0, **ENDLESS, **cfg}, env_fn=env_fn)
    manager.launch()
    return manager


def _factory(env_id: int, step_s: float) -> Callable[[], LedgerEnv]:
    return lambda: LedgerEnv(env_id, step_s=step_s)


def own_actions(env_num: int) -> Callable[[Iterable[int]], dict[int, int]]:
    """Return a function that gives each env its next action.

    The k-th action of an env is the same in every run, and no two actions of a run are equal.
    """
    counts = [0] * env_num

    def next_actions(env_ids: Iterable[int]) -> dict[int, int]:
        actions = {}
        for env_id in env_ids:
            actions[env_id] = counts[env_id] * env_num + env_id
            counts[env_id] += 1
        return actions

    return next_actions
