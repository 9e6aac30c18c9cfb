"""Rules from the config: how many timesteps to gather, time limits, retries and their pauses."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from envmgr.errors import EnvFailure
from envmgr.texts import counted


@dataclass(frozen=True)
class GatherPolicy:
    """How many timesteps a gather waits for, and how long for more.

    `Gather` in `envmgr.core.engine` waits; it also decides what else ends a gather (failures) and
    what does not (ends of episodes alone).

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
class StartCaps:
    """How many envs may be built or reset; None is any number.

    Attributes:
        per_s: how many may begin to be built or reset in a second, on average: in any span of time
            in which so many whole ones fit.
    """

    at_once: int | None = None
    per_s: float | None = None

    def __bool__(self) -> bool:
        return self.at_once is not None or self.per_s is not None

    def __str__(self) -> str:
        told = (("starting", self.at_once), ("starts_per_s", self.per_s))
        return ", ".join(f"limits.{name} is {most:g}" for name, most in told if most is not None)


_LONGEST_DELAY_S = 60.0
"""The longest pause between renewals in a row, unless `retry_waiting_time` is longer."""

_MOST_SAVED = 10.0
"""How many failures steps can make up for before these happen."""


@dataclass(frozen=True)
class FailurePolicy:
    """How failures are handled.

    Attributes:
        recover: repair and go on; else the first failure closes the manager and raises.
        max_retry: attempts at one reset, the first included.
        renew_between_attempts: make a new env between attempts, while the host is healthy.
        retry_waiting_s: seconds between attempts; doubles with each renewal in a row, up to a
            minute.
        max_failures: failures of one env allowed in the window, besides those that its steps make
            up for.
        max_failure_share: failures that one step makes up for; 0: all failures count.
        max_failures_total: failures of all envs together allowed in the window; None: 10, or as
            many as there are envs if these are more.
        window_s: length of the window in seconds.
        drop_exhausted: drop an env whose budget is spent, instead of raising.
    """

    recover: bool = True
    max_retry: int = 1
    renew_between_attempts: bool = False
    retry_waiting_s: float = 0.1
    max_failures: int = 3
    max_failure_share: float = 0.05
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
        delay_s = self.retry_waiting_s * 2.0 ** min(renewals_in_a_row - 1, 64)
        return min(delay_s, max(_LONGEST_DELAY_S, self.retry_waiting_s))


class _Account:
    """The failures of one env, or of all together, that its steps do not make up for.

    Args:
        policy: the window, and what steps make up for.
        limit: failures allowed; if it is 0, steps make up for none either.

    Attributes:
        failures: the time of each failure, and the failure itself; the oldest first.
    """

    def __init__(self, policy: FailurePolicy, limit: int) -> None:
        self.failures: deque[tuple[float, EnvFailure]] = deque()
        self._window_s = policy.window_s
        self._share = policy.max_failure_share if limit else 0.0
        self._saved = 0.0
        self._steps = 0

    def charge(self, failure: EnvFailure, now: float, steps: int) -> int:
        """Count one failure after `steps` steps in all, and return how many are in the window."""
        failures = self.failures
        while failures and failures[0][0] < now - self._window_s:
            failures.popleft()
        made, self._steps = steps - self._steps - 1, steps  # the last one may be what failed
        failures.append((now, failure))
        if made > 0:  # else it does nothing but fail: that is no matter of shares
            self._make_up(self._share * made)
        return len(failures)

    def _make_up(self, made_up_for: float) -> None:
        """Forget the oldest failures, as far as steps make up for them; save what is left over."""
        saved = self._saved + made_up_for
        while saved >= 1.0 and self.failures:
            self.failures.popleft()
            saved -= 1.0
        self._saved = min(saved, _MOST_SAVED)


class FailureBudget:
    """Counts of failures in a sliding window, for each env and for all together.

    Steps make up for failures: an env that fails in a small share of its steps goes on for ever,
    however fast it is. Failures that steps make up for are forgotten, the oldest first; up to ten
    failures can be made up for before they happen. An env that fails again without a good step in
    between gains nothing from the steps that it made before.

    Args:
        spare_num: number of spares, whose ids follow those of the envs; the failures of a spare
            count for that spare alone.
    """

    def __init__(self, policy: FailurePolicy, env_num: int, spare_num: int = 0) -> None:
        self._policy = policy
        self._env_num = env_num
        self._limit_of_all = policy.max_failures_of_all(env_num)
        self._of_env = [_Account(policy, policy.max_failures) for _ in range(env_num + spare_num)]
        self._of_all = _Account(policy, self._limit_of_all)
        self._where_from = ", max(10, env_num)" if policy.max_failures_total is None else ""

    def charge(
        self,
        env_id: int,
        failure: EnvFailure,
        now: float,
        *,
        steps: int = 0,
        steps_of_all: int = 0,
    ) -> str | None:
        """Count one failure and say which limit it exceeds, if any.

        Args:
            env_id: the env that failed.
            failure: its failure.
            now: the present moment in seconds.
            steps: how many steps the env has been asked for so far, including the one that failed.
            steps_of_all: the same for all envs together.

        Returns:
            None while the budget holds, else a clause that names the exceeded limit.
        """
        policy, window_s = self._policy, self._policy.window_s
        is_spare = env_id >= self._env_num
        own = self._of_env[env_id].charge(failure, now, steps)
        of_all = 0 if is_spare else self._of_all.charge(failure, now, steps_of_all)
        if own > policy.max_failures:
            limit = self._limit_text("max_failures", policy.max_failures, steps)
            who = f"{'spare ' if is_spare else ''}env {env_id}"
            return f"{who} failed {counted(own, 'time')} within {window_s:g} s{limit}"
        if of_all > self._limit_of_all:
            key, where = "max_failures_total", self._where_from
            limit = self._limit_text(key, self._limit_of_all, steps_of_all, where)
            times = counted(of_all, "time")
            return f"all envs together failed {times} within {window_s:g} s{limit}"
        return None

    def _limit_text(self, key: str, limit: int, steps: int, where_from: str = "") -> str:
        """Return what a limit is, and what does not count."""
        share, text = self._policy.max_failure_share, f"{key} is {limit}{where_from}"
        if share * steps < 1.0 or limit == 0:
            return f" ({text})"
        text += f"; max_failure_share {share:.3g}"
        return f", not counting those that steps make up for ({text})"

    def forgive(self, env_id: int) -> None:
        """Forget the failures of one env."""
        self._of_env[env_id].failures.clear()

    def first_cause(self, env_id: int) -> EnvFailure:
        """Return the oldest failure that is in the window: of `env_id`, or else of any env."""
        own, of_all = self._of_env[env_id].failures, self._of_all.failures
        return (own or of_all)[0][1]
