"""Policies as frozen values, without I/O: gathering, time limits, answers to failures."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from envmgr.errors import EnvFailure


@dataclass(frozen=True)
class GatherPolicy:
    """When a gather may return.

    Attributes:
        wait_num: timesteps to wait for; `inf` waits for all that are outstanding.
        step_wait_timeout_s: seconds to wait for stragglers once `wait_num` is met.
    """

    wait_num: float
    step_wait_timeout_s: float = 0.0

    @cached_property
    def gathers_all(self) -> bool:
        """Whether nothing outstanding is ever left behind."""
        return math.isinf(self.wait_num)

    def needed(self, outstanding: int) -> int:
        """Return how many of `outstanding` timesteps have to arrive."""
        return outstanding if self.gathers_all else min(int(self.wait_num), outstanding)


@dataclass(frozen=True)
class Deadlines:
    """Time limits in seconds; None is no limit."""

    step_s: float | None = None
    reset_s: float | None = None
    connect_s: float = 60.0
    close_s: float = 5.0


@dataclass(frozen=True)
class FailurePolicy:
    """How failures are answered.

    Attributes:
        recover: repair and go on; else the first failure closes the manager and raises.
        max_retry: attempts at one reset, the first included.
        renew_between_attempts: make a new env between attempts, while the host is healthy.
        retry_waiting_s: seconds between attempts; doubles with each renewal in a row.
        max_failures: failures of one env allowed in the window.
        max_failures_total: failures of all envs together allowed in it; None: 10, or as many as
            there are envs.
        window_s: length of the window.
        drop_exhausted: an env whose budget is spent is dropped instead of raising.
    """

    recover: bool = True
    max_retry: int = 1
    renew_between_attempts: bool = False
    retry_waiting_s: float = 0.1
    max_failures: int = 3
    max_failures_total: int | None = None
    window_s: float = 60.0
    drop_exhausted: bool = False

    def max_failures_of_all(self, env_num: int) -> int:
        """Return how many failures of all envs together the window allows."""
        given = self.max_failures_total
        return max(10, env_num) if given is None else given

    def renewal_delay_s(self, renewals_in_a_row: int) -> float:
        """Return the pause before a renewal: none before the first in a row, then doubling."""
        if renewals_in_a_row == 0:
            return 0.0
        return self.retry_waiting_s * float(2 ** min(renewals_in_a_row - 1, 16))


class FailureBudget:
    """Counts failures in a sliding window, for each env and for all together.

    Args:
        policy: the limits.
        env_num: number of envs.
        spare_num: number of spares, whose ids follow; what they fail counts for each alone.
    """

    def __init__(self, policy: FailurePolicy, env_num: int, spare_num: int = 0) -> None:
        self._policy = policy
        self._env_num = env_num
        self._of_env: list[deque[tuple[float, EnvFailure]]] = [
            deque() for _ in range(env_num + spare_num)
        ]
        self._of_all: deque[tuple[float, EnvFailure]] = deque()
        self._limit_of_all = policy.max_failures_of_all(env_num)
        self._where_from = ", max(10, env_num)" if policy.max_failures_total is None else ""

    def charge(self, env_id: int, failure: EnvFailure, now: float) -> str | None:
        """Count one failure and say which limit it exceeded, if any.

        Returns:
            None while the budget holds, else a clause that names the exceeded limit.
        """
        entry = (now, failure)
        is_spare = env_id >= self._env_num
        own = self._of_env[env_id]
        for window in (own,) if is_spare else (own, self._of_all):
            window.append(entry)
            while window[0][0] < now - self._policy.window_s:
                window.popleft()
        window_s = self._policy.window_s
        if len(own) > self._policy.max_failures:
            return (
                f"{'spare ' if is_spare else ''}env {env_id} failed {len(own)} times within "
                f"{window_s:g} s "
                f"(max_failures is {self._policy.max_failures})"
            )
        if not is_spare and len(self._of_all) > self._limit_of_all:
            return (
                f"all envs together failed {len(self._of_all)} times within {window_s:g} s "
                f"(max_failures_total is {self._limit_of_all}{self._where_from})"
            )
        return None

    def forgive(self, env_id: int) -> None:
        """Forget the failures of one env."""
        self._of_env[env_id].clear()

    def first_cause(self, env_id: int) -> EnvFailure:
        """Return the oldest failure of `env_id` that is still in the window."""
        return self._of_env[env_id][0][1]
